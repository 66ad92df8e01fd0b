"""The dimension "stages" finds a fault in each stage. It is for GPUs; here the CPU's path stands
in, whose ops have the same shapes and whose dots are well within the bounds.
"""

import sys

import pytest
import torch

from exactmoe import DenseMLP, reference
from exactmoe.formats import PackedWeight
from exactmoe.ops.cpu_path import CpuPath
from exactmoe.proof import stages as helpers
from exactmoe.proof import verify
from faulty_layers import Fault, faulty, flip
from gpu_layers import packed
from layers import normal, true_values
from small_layers import small_dense, small_layer

# The package's attribute of this name is the function.
MODULE = sys.modules["exactmoe.proof.dimensions.stages"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(MODULE, "gpu_order", lambda layer: True)


LAYERS = [
    ("score", "a16", "nvfp4"),
    ("hash", "a16", "mxfp4"),
    ("score", "a8", "mxfp4"),
    ("bare", "a8", "nvfp4"),
]


@pytest.mark.parametrize(("kind", "numerics", "format"), LAYERS)
def test_a_right_layer(rng, kind, numerics, format):
    report = verify(small_layer(rng, kind, numerics, format), dimensions=["stages"])
    report.raise_on_mismatch()
    entries = {name.partition(":")[0] for name in report.bounds}
    assert entries == ({"experts"} if kind == "bare" else {"block", "experts"})
    assert {f"experts: {name} dot, relative L2" for name in ("gate", "up", "down")} <= set(
        report.bounds
    )


def test_a_right_dense_layer_with_segments(rng):
    sizes = ((32, 4128), (32, 4128), (4128, 32))
    layer = DenseMLP(*(normal(rng, *size, scale=0.05) for size in sizes), backend="cpu")
    report = verify(layer, dimensions=["stages"])
    report.raise_on_mismatch()
    assert len(report.bounds) == 6


class LastBit(Fault):
    def after(self, layer, x, ids, y):
        return flip(y, slice(-1, None))


def test_a_layer_that_is_not_its_stages(rng):
    report = verify(faulty(small_layer(rng), LastBit), dimensions=["stages"])
    cases = [difference.case for difference in report.differences]
    assert cases == ["block: y of the parts"]
    assert report.mismatches >= 2
    report = verify(faulty(small_layer(rng, "bare"), LastBit), dimensions=["stages"])
    assert [d.case for d in report.differences] == ["experts: y of the stages"]
    report = verify(faulty(small_dense(rng), LastBit), dimensions=["stages"])
    assert [d.case for d in report.differences] == ["dense: y of its sum"]


def torch_silu(gate, up, limit):
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def test_another_activation(rng, monkeypatch):
    """A silu of other last bits: seen in `a8`, whose h is float32."""
    monkeypatch.setattr(helpers, "swiglu32", torch_silu)
    report = verify(small_layer(rng, "bare", "a8", "mxfp4"), dimensions=["stages"])
    assert [d.case for d in report.differences] == ["experts: h"]


FAULTS = {
    "select": "block: expert ids",
    "routing_weights": "block: weights",
    "finish": "block: y of the parts",
}


@pytest.mark.parametrize("name", FAULTS)
def test_another_rule_of_the_reference(rng, monkeypatch, name):
    right = getattr(reference, name)

    def wrong(*arguments):
        found = right(*arguments)
        if isinstance(found, tuple):
            return found[0].flip(1), found[1]
        wrong_bits = found.clone()
        wrong_bits.view(torch.int16 if found.dtype == torch.bfloat16 else torch.int32)[0, 0] ^= 1
        return wrong_bits

    monkeypatch.setattr(reference, name, wrong)
    report = verify(small_layer(rng), dimensions=["stages"])
    assert FAULTS[name] in [difference.case for difference in report.differences]


def test_a_wrong_order_of_the_route_table(rng, monkeypatch):
    right = CpuPath.route_table

    def wrong(expert_ids, num_experts, routes):
        right(expert_ids, num_experts, routes)
        routes.slots[:2] = routes.slots[:2].flip(0)

    monkeypatch.setattr(CpuPath, "route_table", staticmethod(wrong))
    report = verify(small_layer(rng, "bare"), dimensions=["stages"])
    assert [difference.case for difference in report.differences] == ["experts: route table"]


def test_a_dot_that_is_not_good_enough(rng, monkeypatch):
    """Products cut to 2^-12: every stage agrees with itself, and float64 says no."""
    right = CpuPath.down

    def wrong(h, down, routes, numerics, slots):
        right(h, down, routes, numerics, slots)
        slots.mul_(1.0 + 2.0**-12)

    monkeypatch.setattr(CpuPath, "down", staticmethod(wrong))
    report = verify(small_layer(rng, "bare"), dimensions=["stages"])
    assert report.failed
    assert any("down dot, relative L2" in excess for excess in report.excesses)
    assert any("gate dot, relative L2" in excess for excess in report.excesses)


def test_columns_of_every_format(rng):
    """A copy of some columns has the values of those columns."""
    for format in ("bf16", "nvfp4", "nvfp4-divide", "mxfp4", "fp8"):
        weight: PackedWeight = packed(rng, format, 2, 48, 384)
        part = helpers.columns_of(weight, 128, 320)
        assert torch.equal(true_values(part), true_values(weight)[:, :, 128:320]), format
