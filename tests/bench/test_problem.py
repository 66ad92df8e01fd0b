"""Shapes, drawn weights and drawn selections."""

import pytest
import torch

from exactmoe.bench.problem import draw_problem, draw_router
from exactmoe.bench.shapes import SHAPES, parse_shape
from exactmoe.bench.truth import true_weight
from exactmoe.errors import ConfigError


def test_shape_by_name_and_by_numbers():
    assert parse_shape("glm") is SHAPES["glm"]
    shape = parse_shape("256,128,8,2")
    sizes = shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k
    assert (*sizes, shape.shared_size, shape.dense_sizes) == (256, 128, 8, 2, 128, (128,))


@pytest.mark.parametrize("text", ["glm5", "256,128,8", "256,128,8,9", "0,128,8,2", "a,b,c,d"])
def test_shape_that_is_none(text):
    with pytest.raises(ConfigError, match="--shape is .*allowed: glm, deepseek, small, or H,I,E,K"):
        parse_shape(text)


def test_shape_of_odd_sizes():
    with pytest.raises(ConfigError, match="multiples of 32"):
        parse_shape("250,128,8,2")


def test_an_expert_of_glm_has_the_published_bytes():
    # 14.16 MB: H 4096, I 2048, NVFP4 (4.5 bits a weight), three global scales.
    shape = parse_shape("4096,2048,1,1")
    rng = torch.Generator().manual_seed(0)
    problem = draw_problem(shape, "nvfp4", torch.device("cpu"), rng)
    assert problem.expert_bytes == 3 * 4096 * 2048 * 4.5 / 8 + 12


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_projections_keep_the_size_of_their_input(rng, format):
    problem = draw_problem(parse_shape("2048,64,2,1"), format, torch.device("cpu"), rng)
    for weight in (problem.gate, problem.up, problem.down):
        x = torch.randn(weight.columns, dtype=torch.float64)
        size = (true_weight(weight, 1) @ x).pow(2).mean().sqrt()
        assert 0.3 < size < 3


def test_gate_and_up_have_one_global_scale(shape, rng):
    problem = draw_problem(shape, "nvfp4", torch.device("cpu"), rng)
    assert torch.equal(problem.gate.global_scale, problem.up.global_scale)
    assert problem.gate.global_scale.unique().numel() == shape.num_experts


def test_other_format_shares_the_codes(shape, rng):
    problem = draw_problem(shape, "nvfp4", torch.device("cpu"), rng)
    other = problem.as_format("mxfp4", rng)
    assert other.format == other.gate.format == "mxfp4" and other.gate.global_scale is None
    assert other.down.codes.data_ptr() == problem.down.codes.data_ptr()
    assert problem.as_format("nvfp4", rng) is problem


def test_selections_are_distinct_and_fresh(shape, selections):
    for selection in selections:
        assert selection.x.shape == (9, 256) and selection.x.dtype == torch.bfloat16
        assert selection.expert_ids.dtype == torch.int32 and selection.weights.is_contiguous()
        assert all(len(set(row)) == 2 for row in selection.expert_ids.tolist())
        torch.testing.assert_close(selection.weights.sum(-1), torch.ones(9))
    assert not torch.equal(selections[0].expert_ids, selections[1].expert_ids)
    first = selections[0].first(1)
    assert first.distinct_experts() == 2
    assert torch.equal(first.x[0], selections[0].x[0])
    assert selections[0].distinct_experts() == len(set(selections[0].expert_ids.flatten().tolist()))


def test_router_chooses_near_uniformly(shape, rng):
    router = draw_router(shape, torch.device("cpu"), rng)
    x = torch.randn(512, shape.hidden_size, generator=rng)
    chosen = (x @ router.weight_f32.T).topk(2).indices.flatten().bincount(minlength=8)
    assert chosen.min() > 60 and chosen.max() < 220
