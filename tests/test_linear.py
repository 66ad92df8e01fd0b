"""DenseLinear: packed linear layers outside the MLP blocks, with the dot of a dense part."""

import copy
import pickle

import pytest
import torch

from dense_loops import projected
from exactmoe import DenseLinear, DenseMLP, Limits, PackedWeight
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.ops import DECODED, DEVICE
from layers import BACKENDS, assert_same_bits, normal, relative_l2, true_values
from paths import FORMATS, one_expert, random_weight


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [288, 4128])
def test_plain_loops(format, columns, rng):
    """Two segments where k is above 4096, a last block that is short, rows that fill none."""
    weight, x = random_weight(rng, format, 1, 48, columns), normal(rng, 3, columns)
    expected = projected(weight, x, 4096)
    for backend in BACKENDS:
        assert_same_bits(DenseLinear(weight, backend=backend, output="f32")(x), expected)
    assert_same_bits(DenseLinear(weight)(x), expected.bfloat16())


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_the_down_projection_of_a_dense_mlp(format, rng):
    """gate and up that make h = silu(20) x 1 = 20 in one column leave a column of the weight."""
    down, inner = random_weight(rng, format, 1, 144, 160), 160
    gate, up = torch.zeros(inner, 144), torch.zeros(inner, 144)
    gate[:, 0], up[7, 1] = 20, 1
    mlp = DenseMLP(gate.bfloat16(), up.bfloat16(), down, output="f32")
    h = torch.zeros(1, inner).bfloat16()
    h[0, 7] = 20
    x = torch.zeros(1, 144).bfloat16()
    x[0, :2] = 1
    assert_same_bits(DenseLinear(down, output="f32")(h), mlp(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_groups_are_layers_of_their_own(format, backend, rng):
    weight = random_weight(rng, format, 3, 144, 288)
    x = normal(rng, 5, 3 * 288)
    layer = DenseLinear(weight, backend=backend)
    assert (layer.groups, layer.in_features, layer.out_features) == (3, 864, 432)
    parts = [
        DenseLinear(one_expert(weight, g), backend=backend)(x.view(5, 3, 288)[:, g])
        for g in range(3)
    ]
    assert_same_bits(layer(x), torch.cat(parts, 1))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_row_does_not_depend_on_its_place(groups, rng):
    """Widths, pieces, strides, neighbours that are NaN; and no rows."""
    weight = random_weight(rng, "fp8", groups, 48, 272)
    layer, x = DenseLinear(weight), normal(rng, 70, groups * 272)
    rows = torch.cat([layer(x[t : t + 1]) for t in range(70)])
    assert_same_bits(layer(x), rows)
    assert_same_bits(DenseLinear(weight, Limits(max_rows=7))(x), rows)
    wide = torch.full((70, 2 * groups * 272), float("nan")).bfloat16()
    wide[:, ::2] = x
    assert_same_bits(layer(wide[:, ::2]), rows)
    x[3] = float("nan")
    found = layer(x)
    assert_same_bits(torch.cat([found[:3], found[4:]]), torch.cat([rows[:3], rows[4:]]))
    assert bool((found[3].view(torch.int16) == 0x7FC0).all())
    assert layer(x[:0]).shape == (0, groups * 48)


def test_error_against_float64(rng):
    """Contract section 8: a dot on the CPU."""
    weight, x = random_weight(rng, "fp8", 1, 256, 2048), normal(rng, 64, 2048)
    truth = x.double() @ true_values(weight)[0].T
    assert relative_l2(DenseLinear(weight, output="f32")(x), truth) <= 2.0**-20


def test_it_is_a_module(rng):
    """state_dict, deepcopy, pickle; a cast of the model changes no weight (field fault A16)."""
    weight, x = random_weight(rng, "fp8", 2, 48, 272), normal(rng, 3, 544)
    layer = DenseLinear(weight)
    y = layer(x)
    assert layer.weight.codes.data_ptr() == weight.codes.data_ptr()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x), y)
    fresh = DenseLinear(random_weight(rng, "fp8", 2, 48, 272))
    assert not fresh(x).equal(y)
    fresh.load_state_dict(layer.state_dict())
    assert_same_bits(fresh(x), y)
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert cast.weight.scales.dtype == torch.float32
    assert_same_bits(cast(x), y)
    layer.weight_scales.mul_(2)
    assert_same_bits(layer(x), (y.float() * 2).bfloat16())


def test_out(rng):
    weight, x = random_weight(rng, "mxfp4", 1, 48, 64), normal(rng, 3, 64)
    layer = DenseLinear(weight)
    out = torch.empty(3, 48).bfloat16()
    assert layer(x, out=out) is out
    assert_same_bits(out, layer(x))
    with pytest.raises(ConfigError, match=r"out is torch.bfloat16 \(3, 47\)"):
        layer(x, out=torch.empty(3, 47).bfloat16())


def test_refusals(rng):
    weight = random_weight(rng, "mxfp4", 1, 48, 64)
    layer = DenseLinear(weight)
    with pytest.raises(Unsupported, match="x is torch.float32; allowed: torch.bfloat16"):
        layer(torch.zeros(3, 64))
    with pytest.raises(ConfigError, match=r"x has shape \(3, 63\); allowed: \[T, 64\]"):
        layer(torch.zeros(3, 63).bfloat16())
    with pytest.raises(ConfigError, match="weight is Tensor; allowed: PackedWeight"):
        DenseLinear(torch.zeros(48, 64).bfloat16())
    with pytest.raises(ConfigError, match="output is 'f16'"):
        DenseLinear(weight, output="f16")


def test_it_says_what_it_is(rng):
    layer = DenseLinear(random_weight(rng, "fp8", 2, 48, 272))
    sizes = "in_features=544, out_features=96, groups=2, format=fp8"
    assert repr(layer) == f"DenseLinear({sizes})"
    found = layer.explain(3)
    assert found.plan.backend == "cpu" and found.formats == ("fp8",)
    assert "weight fp8" in str(found)
    assert layer.workspace_bytes(5) > layer.workspace_bytes(1)


def test_workspace_holds_x_and_the_sums():
    layer = DenseLinear(PackedWeight("bf16", torch.zeros(2, 16, 64).bfloat16()))
    assert layer.workspace_bytes(4) == 4 * (2 * 64 + 2 * 16) * 4
    names = [[region.name for region in layer.regions(4, s)] for s in (DECODED, DEVICE)]
    assert names == [["x", "linear_out"], ["x"]]
    wide = DenseLinear(layer.weight, output="f32")
    assert [region.name for region in wide.regions(4, DEVICE)] == ["x", "linear_out"]


def test_torch_compile(rng):
    layer, x = DenseLinear(random_weight(rng, "fp8", 2, 48, 272)), normal(rng, 3, 544)

    def call(x):
        return layer(x) + 1

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), call(x))
