"""Peers against float64: torch's as it is, humming's over a false humming on the CPU."""

from dataclasses import replace

import pytest
import torch

import false_humming
from exactmoe.bench.peers import PEERS, chosen, humming
from exactmoe.bench.peers.cublas import build
from exactmoe.bench.peers.grouped_mm import GroupedMM
from exactmoe.bench.peers.humming import Form, Humming, blocks_of, intervals, stacked
from exactmoe.bench.problem import draw_dense
from exactmoe.bench.truth import dense_truth, experts_truth
from exactmoe.errors import ConfigError, Unsupported

WIDTHS = (1, 4, 9)


def check(make, problem, selections, limit):
    for width in WIDTHS:
        for selection in selections:
            part = selection.first(width)
            y = make(part)()
            assert y.dtype == torch.bfloat16
            assert experts_truth(problem, part).error(y) < limit


def test_grouped_mm(problem, selections):
    check(GroupedMM(problem, WIDTHS), problem, selections, 8e-3)


def test_linear(shape, rng):
    layer = draw_dense(shape, 64, torch.device("cpu"), rng, "auto")
    x = torch.randn(5, shape.hidden_size, generator=rng).bfloat16()
    assert dense_truth(layer, x).error(build(layer)(x)()) < 8e-3


FORMS = [
    (Form(), 8e-3),
    (Form(batch_invariant=True), 8e-3),
    (Form(gemm_type="grouped_contiguous"), 8e-3),
    (Form(fp8=True), 6e-2),
]


@pytest.mark.parametrize(("form", "limit"), FORMS)
def test_humming(monkeypatch, problem, selections, form, limit):
    false_humming.install(monkeypatch)
    monkeypatch.setattr(humming, "_require_card", lambda device: None)
    check(Humming(form, problem, WIDTHS), problem, selections, limit)


def test_humming_wrong_scales_are_seen(monkeypatch, problem, selections):
    false_humming.install(monkeypatch)
    monkeypatch.setattr(humming, "_require_card", lambda device: None)
    down = replace(problem.down, scales=problem.down.scales.roll(1, 0))
    make = Humming(Form(), replace(problem, down=down), WIDTHS)
    assert experts_truth(problem, selections[0]).error(make(selections[0])()) > 0.1


def test_humming_needs_a_card(problem):
    with pytest.raises(Unsupported, match="humming needs an NVIDIA card; this is cpu"):
        Humming(Form(), problem, WIDTHS)


def test_stacked(problem):
    tensors = stacked([problem.gate, problem.up])
    assert tensors["weight"].shape == (8, 256, 128)
    assert torch.equal(tensors["weight"][:, :128], problem.gate.codes)
    assert torch.equal(tensors["weight"][:, 128:], problem.up.codes)
    if problem.format == "nvfp4":
        assert tensors["weight_scale"].dtype == torch.float8_e4m3fn
        other = replace(problem.up, global_scale=problem.up.global_scale * 2)
        with pytest.raises(ConfigError, match="global scales differ"):
            stacked([problem.gate, other])
    else:
        assert "weight_scale_2" not in tensors


def test_blocks(selections):
    selection = selections[0].first(3)
    selection.expert_ids[:] = torch.tensor([[5, 1], [1, 2], [1, 5]])
    found = blocks_of(selection, 8, 2)
    assert found["sorted_ids"].tolist() == [1, 2, 4, 6, 3, 6, 0, 5]
    assert found["expert_ids"].tolist() == [1, 1, 2, 5]
    assert found["num_tokens_padded"].tolist() == [8]


def test_intervals_join_equal_settings():
    a, b = {"block_shape": (8,)}, {"block_shape": (16,)}
    assert intervals({8: a, 16: a, 64: b}) == [(0, 16, a), (16, 1 << 30, b)]
    assert intervals({8: a, 16: b, 64: a}) == [(0, 8, a), (8, 16, b), (16, 1 << 30, a)]


def test_chosen():
    experts, dense = chosen(("all",))
    assert [peer.name for peer in experts] == list(PEERS) and dense[0].name == "cublas"
    assert chosen(("none",)) == ([], [])
    assert [peer.name for peer in chosen(("humming-mxfp4",))[0]] == ["humming-mxfp4"]
    with pytest.raises(ConfigError, match="peer is 'marlin'; allowed: all, none, grouped_mm, "):
        chosen(("marlin",))
