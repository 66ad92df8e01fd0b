"""Router: what it takes, what it refuses, and that nothing narrows it."""

import copy
import pickle

import pytest
import torch

from exactmoe import Router, RouterConfig
from exactmoe.errors import ConfigError
from layers import assert_same_bits, normal

SIGMOID = RouterConfig(score="sigmoid", factor=2.5)


@pytest.fixture(params=["score", "hash"])
def router(request, rng) -> Router:
    weight = torch.randn(6, 32, generator=rng)
    if request.param == "hash":
        return Router(weight, table=torch.randint(6, (9, 2), generator=rng), config=SIGMOID)
    return Router(weight.bfloat16(), torch.randn(6, generator=rng) + 7, config=SIGMOID)


def state(router: Router) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in router.state_dict().items()}


def assert_same_state(router: Router, expected: dict[str, torch.Tensor]) -> None:
    assert router.state_dict().keys() == expected.keys()
    for name, tensor in router.state_dict().items():
        assert_same_bits(tensor, expected[name])


CHANGES = [
    lambda r: r.to(torch.bfloat16),
    lambda r: r.half(),
    lambda r: r.float(),
    lambda r: r.double(),
    lambda r: r.to("cpu", torch.float64),
    lambda r: r.bfloat16().cpu(),
    lambda r: r.eval().requires_grad_(False),
    lambda r: copy.deepcopy(r),
    lambda r: pickle.loads(pickle.dumps(r)),
    lambda r: torch.nn.Sequential(r).to(torch.bfloat16)[0],
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_move_changes_a_bit(change, router):
    expected = state(router)
    moved = change(router)
    assert_same_state(moved, expected)
    assert_same_bits(moved.weight_f32, expected["weight"].float())
    assert moved.config == SIGMOID


def test_state_dict_round_trip_renews_the_float32_copy(router):
    other = copy.deepcopy(router)
    for tensor in other.state_dict().values():
        tensor.zero_()
    assert not other.weight_f32.any()
    other.load_state_dict(router.state_dict())
    assert_same_state(other, state(router))
    assert_same_bits(other.weight_f32, router.weight.float())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_another_type_is_refused(assign, router):
    expected = state(router)
    for name, tensor in expected.items():
        wrong = torch.float64 if tensor.is_floating_point() else torch.int32
        changed = {**expected, name: tensor.to(wrong)}
        with pytest.raises(ConfigError, match=f"{name} is {wrong}.*{tensor.dtype}"):
            router.load_state_dict(changed, assign=assign)
    router.load_state_dict(expected, assign=assign)
    assert_same_state(router, expected)


@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_a_table_of_ids_that_no_expert_has_is_refused(bad, rng):
    table = torch.randint(6, (9, 2), generator=rng)
    wrong = table.clone()
    wrong[4, 1] = bad
    weight = normal(rng, 6, 32)
    message = f"row 4, column 1 is {bad}; allowed: 0 to 5"
    with pytest.raises(ConfigError, match=message):
        Router(weight, table=wrong, config=SIGMOID)
    router = Router(weight, table=table, config=SIGMOID)
    with pytest.raises(ConfigError, match=message):
        router.load_state_dict({**router.state_dict(), "table": wrong})
    assert_same_bits(router.table, table)


def test_a_table_may_repeat_ids_and_keeps_int64(rng):
    table = torch.tensor([[1, 1], [0, 5]], dtype=torch.int32)
    router = Router(normal(rng, 6, 32), table=table, config=SIGMOID)
    assert router.table.dtype == torch.int64
    assert router.table.tolist() == table.tolist()


def test_what_does_not_fit_is_refused(rng):
    weight, bias, table = normal(rng, 6, 32), torch.zeros(6), torch.zeros(3, 2).long()
    for arguments, message in (
        ((weight.half(),), r"torch\.float16 \(6, 32\).*bfloat16 or float32"),
        ((weight[0],), r"\(32,\)"),
        ((normal(rng, 6, 24),), "24 columns.*16"),
        ((weight, bias.bfloat16()), r"bias is torch\.bfloat16 \(6,\).*float32 \[6\]"),
        ((weight, bias[:5]), r"bias is torch\.float32 \(5,\)"),
        ((weight, None, table.float()), r"table is torch\.float32"),
        ((weight, None, table[0]), r"table is torch\.int64 \(2,\)"),
        ((weight, bias, table), "one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            Router(*arguments, config=SIGMOID)


def test_a_model_s_parameters_are_shared_and_detached(rng):
    weight = torch.nn.Parameter(normal(rng, 6, 32))
    bias = torch.nn.Parameter(torch.zeros(6))
    router = Router(weight, bias, config=SIGMOID)
    assert not router.weight.requires_grad and not router.bias.requires_grad
    assert router.weight.data_ptr() == weight.data_ptr()
    assert router.bias.data_ptr() == bias.data_ptr()
    assert not list(router.parameters())


def test_repr(router):
    assert "num_experts=6" in repr(router) and "factor=2.5" in repr(router)


def test_transposed_and_strided_tensors_are_read_as_they_are_meant(rng):
    weight, bias = normal(rng, 6, 32), torch.arange(6, dtype=torch.float32)
    table = torch.arange(10).remainder(6).view(5, 2)
    plain = Router(weight, bias, config=SIGMOID)
    turned = Router(weight.T.contiguous().T, bias.repeat_interleave(2)[::2], config=SIGMOID)
    for name in ("weight_f32", "weight_bf16", "bias"):
        found, wanted = getattr(turned, name), getattr(plain, name)
        assert found.is_contiguous()
        assert_same_bits(found, wanted)
    hashed = Router(weight, table=table.T.contiguous().T, config=SIGMOID)
    assert hashed.table.is_contiguous()
    assert hashed.table.tolist() == table.tolist()
