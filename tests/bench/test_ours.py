"""The calls that are timed: the bytes of the layer, errors against float64, faults seen."""

import pytest
import torch

from exactmoe import Limits, MoELayer
from exactmoe.bench import bits, ours
from exactmoe.bench.problem import Selection, draw_dense, draw_router
from exactmoe.bench.truth import Truth, dense_truth, experts_truth
from exactmoe.errors import BitMismatch


def layer_of(problem, rng, numerics="a16"):
    shape, device = problem.shape, problem.device
    shared = draw_dense(shape, shape.shared_size, device, rng, "auto")
    router = draw_router(shape, device, rng)
    config = shape.config(numerics)
    return MoELayer(config, problem.bank(), router, shared, limits=Limits(max_rows=9))


@pytest.mark.parametrize("numerics", ["a16", "a8"])
def test_presorted_has_the_bytes_of_the_layer(problem, selections, rng, numerics):
    layer = layer_of(problem, rng, numerics)
    scratch = ours.Scratch(layer, 9)
    for selection in [selections[0], selections[1].first(1), selections[2].first(4)]:
        expected = layer.experts(selection.x, selection.expert_ids, selection.weights)
        call = ours.Presorted(layer, selection, scratch)
        for _ in range(2):
            call.y.fill_(float("nan"))
            bits.require_equal("presorted", expected, call())
        bits.require_equal("sorted", expected, ours.with_sort(layer, selection)())
        bits.require_equal("block", layer(selection.x), ours.block(layer, selection)())


def test_errors_of_right_and_wrong_results(problem, selections, rng):
    layer, selection = layer_of(problem, rng), selections[0]
    truth = experts_truth(problem, selection)
    assert truth.rows == (0, 8) and experts_truth(problem, selection.first(1)).rows == (0,)
    y = layer.experts(selection.x, selection.expert_ids, selection.weights)
    assert 1e-4 < truth.error(y) < 6e-3
    assert truth.error(2 * y) > 0.9
    y[8, 3] = float("nan")
    assert truth.error(y) != truth.error(y)
    # Only sampled rows count.
    assert Truth((0,), truth.values[:1]).error(y) < 6e-3


def test_truth_is_clamped_as_the_layer_is(problem, selections, rng):
    layer, selection = layer_of(problem, rng), selections[0]
    loud = Selection(selection.x * 30, selection.expert_ids, selection.weights)
    y = layer.experts(loud.x, loud.expert_ids, loud.weights)
    assert experts_truth(problem, loud).error(y) < 6e-3


def test_error_of_a_dense_mlp(shape, rng):
    layer = draw_dense(shape, 64, torch.device("cpu"), rng, "auto")
    x = torch.randn(5, shape.hidden_size, generator=rng).bfloat16()
    y = ours.dense(layer, x)()
    assert 1e-4 < dense_truth(layer, x).error(y) < 6e-3


def test_verify_widths_sees_one_bit_at_one_width(problem, selections, rng):
    layer = layer_of(problem, rng)

    def call(selection):
        return ours.with_sort(layer, selection)()

    bits.verify_widths("experts", call, selections[0], (1, 4, 9))

    def faulty(selection):
        y = call(selection)
        if selection.num_tokens == 4:
            y.view(torch.int16)[2, 7] ^= 1
        return y

    with pytest.raises(BitMismatch, match="experts, width 4: token 2, element 7"):
        bits.verify_widths("experts", faulty, selections[0], (1, 4, 9))


def test_verify_replay_sees_an_element_that_is_not_written(timer, selections):
    y = torch.zeros(2, 4, dtype=torch.bfloat16)

    def call():
        y[:, :3] = 1
        return y

    replay = timer.capture([call])
    with pytest.raises(BitMismatch, match=r"replay, captured, call 0: token 0, element 3 is nan"):
        bits.verify_replay("replay", replay, [y.clone()])

    def whole():
        return y.fill_(1)

    bits.verify_replay("replay", timer.capture([whole]), [whole().clone()])


def test_equal_values_of_other_bytes_differ():
    with pytest.raises(BitMismatch, match="zeros: token 1, element 0 is 0.0; expected -0.0"):
        bits.require_equal("zeros", torch.tensor([[1.0], [-0.0]]), torch.tensor([[1.0], [0.0]]))
    nan = torch.tensor([[float("nan")]])
    bits.require_equal("nan", nan, nan.clone())
