"""Backends of GPUs that this machine does not have: the architecture is said to be another one."""

import importlib
import types
from dataclasses import replace

import pytest
import torch

from exactmoe import Numerics
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.plan import (
    ARCHITECTURES,
    WeightShape,
    architectures,
    choose,
    dense_tiles_of,
    first_line,
    mlp_tiles_of,
    tiles_of,
)
from exactmoe.plan.architectures import require_one_architecture

CARD = torch.device("cuda", 0)
A16, A8 = Numerics(), Numerics.preset("a8")
A8_BF16 = replace(A8, units="bf16")
A8_FP8 = replace(A8, units="fp8")
EXPERTS = tuple(WeightShape("nvfp4", *shape) for shape in ((256, 128), (256, 128), (128, 256)))
module = importlib.import_module("exactmoe.plan.choose")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Everything is installed; `machine(name)` says which GPU it is."""
    names = {}
    monkeypatch.delenv("EXACTMOE_BACKEND", raising=False)
    monkeypatch.setattr(module, "_importable", lambda name: True)
    monkeypatch.setattr(
        architectures,
        "architecture_name",
        lambda device: names.get(device, names[CARD]) if device.type == "cuda" else device.type,
    )

    def become(name: str, other: str | None = None) -> None:
        module._chosen.cache_clear()
        names[CARD] = name
        if other is not None:
            names[torch.device("cuda", 1)] = other

    become("sm_90")
    yield become
    module._chosen.cache_clear()


def reasons(plan) -> dict[str, str]:
    return {r.backend: r.reason for r in plan.rejected}


def test_sm_90_takes_the_fast_path(machine):
    plan = choose(A16, CARD, "auto", EXPERTS)
    assert plan.backend == "cuda"
    assert plan.reason == "the fast path of this device (sm_90, wgmma m64nNk16)"
    assert reasons(plan)["triton"] == "portable: same bits, slower"
    assert "order of the dots gives other bits" in reasons(plan)["cpu"]


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"sm_90"}))
def test_other_architectures_take_the_portable_path(name, machine):
    machine(name)
    plan = choose(A16, CARD, "auto", EXPERTS)
    assert plan.backend == "triton"
    assert f"({name}, " in plan.reason and f"{name} is compiled, untested" in plan.reason
    assert reasons(plan)["cuda"] == (f"it needs compute capability 9.0 (sm_90); cuda:0 is {name}")
    with pytest.raises(Unsupported, match=f"'cuda' cannot run on cuda:0.*{name}.*auto, triton$"):
        choose(A16, CARD, "cuda", EXPERTS)


@pytest.mark.parametrize("name", ["sm_70", "sm_75", "sm_110", "gfx90a", "gfx1100"])
@pytest.mark.parametrize("backend", ["auto", "triton", "cuda", "cpu"])
def test_an_architecture_without_a_path_is_refused_with_the_list(name, backend, machine):
    machine(name)
    with pytest.raises(Unsupported, match=f"cuda:0 is {name}, which has no path; allowed: sm_80, "):
        choose(A16, CARD, backend, EXPERTS)


@pytest.mark.parametrize(
    ("numerics", "experts", "fixed", "reason"),
    [
        (A16, (), False, "routed experts and dense MLPs, none for a linear layer"),
        (A16, EXPERTS, True, "rearranges the experts' bytes, which belong to a module"),
        (A16, (WeightShape("bf16", 256, 128),) * 3, False, "gate is bf16; it takes nvfp4, mxfp4"),
        (
            A16,
            (*EXPERTS[:2], WeightShape("nvfp4", 192, 256)),
            False,
            "down has 192 rows and 256 columns; it takes multiples of 128",
        ),
        (
            A16,
            (EXPERTS[0]._replace(contiguous=False), *EXPERTS[1:]),
            False,
            "the rows of an expert of gate do not lie one after the other",
        ),
    ],
)
def test_why_the_fast_path_is_not_taken(numerics, experts, fixed, reason, machine):
    plan = choose(numerics, CARD, "auto", experts, fixed)
    assert plan.backend == "triton"
    assert reason in reasons(plan)["cuda"]
    if experts:
        with pytest.raises(Unsupported, match="'cuda' cannot run on cuda:0: .*auto, triton$"):
            choose(numerics, CARD, "cuda", experts, fixed)


DENSE = tuple(WeightShape("bf16", *shape) for shape in ((192, 128), (192, 128), (128, 192)))


def test_a_linear_layer_of_the_fast_path(machine):
    plan = choose(A16, CARD, "cuda")
    assert plan.backend == "triton"
    assert plan.reason.startswith(
        "backend='cuda' was asked for; this part runs on the portable kernels: it has kernels for"
    )


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_dense_mlp_takes_the_fast_path(asked, machine):
    assert choose(A16, CARD, asked, dense=DENSE).backend == "cuda"
    assert choose(A16, CARD, asked, dense=DENSE[:2]).backend == "cuda"
    assert choose(A16, CARD, "triton", dense=DENSE).backend == "triton"
    machine("sm_80")
    assert choose(A16, CARD, asked, dense=DENSE).backend == "triton"


UNFIT_DENSE = [
    (DENSE[0]._replace(format="fp8"), "dense gate is fp8; it takes bf16"),
    (DENSE[0]._replace(rows=96), "gate has 96 rows and 128 columns; it takes multiples of 64"),
    (DENSE[0]._replace(columns=96), "gate has 192 rows and 96 columns; it takes multiples of 64"),
    (DENSE[0]._replace(aligned=False), "rows of dense gate do not begin at multiples of 16 bytes"),
]


@pytest.mark.parametrize(("gate", "reason"), UNFIT_DENSE)
def test_why_a_dense_mlp_does_not_take_it(gate, reason, sm_90):
    """In the plan of the MLP, and in the tiles of a shared expert whose layer takes the path."""
    dense = (gate, *DENSE[1:])
    plan = choose(A16, CARD, "auto", dense=dense)
    assert plan.backend == "triton"
    assert reason in reasons(plan)["cuda"]
    asked = choose(A16, CARD, "cuda", dense=dense)
    assert asked.backend == "triton" and reason in asked.reason
    of_layer = choose(A16, CARD, "auto", EXPERTS)
    found = mlp_tiles_of(of_layer, dense, 8)
    for choice in found:
        assert choice.kernel == "kernels/triton/dense_mlp.py"
        assert "; not kernels/cuda/dense.cu: " in choice.reason and reason in choice.reason
    line = first_line(of_layer, A16, ("bf16",) * 3, found)
    assert line.count(f" | not {choice.refused} | not triton: ") == 1
    assert reason in choice.refused


def test_tiles_of_a_dense_mlp(sm_90, monkeypatch):
    monkeypatch.delenv("EXACTMOE_TILE", raising=False)
    plan = choose(A16, CARD, "auto", EXPERTS)
    found = mlp_tiles_of(plan, DENSE, 8)
    assert [(c.op, c.kernel) for c in found] == [
        ("dense gate_up", "kernels/cuda/dense.cu"),
        ("dense down", "kernels/cuda/dense.cu"),
    ]
    assert found[0].reason == "8 rows; the least time by the measured cycles of each tile"
    assert [c.op for c in mlp_tiles_of(plan, DENSE[:2], 8)] == ["dense gate_up"]
    portable = mlp_tiles_of(choose(A16, CARD, "triton", EXPERTS), DENSE, 8)
    assert {c.kernel for c in portable} == {"kernels/triton/dense_mlp.py"}
    assert all("not kernels/cuda" not in c.reason for c in portable)
    assert mlp_tiles_of(choose(A16, torch.device("cpu")), DENSE, 8) == ()
    monkeypatch.setenv("EXACTMOE_TILE", "16")
    assert {c.reason for c in mlp_tiles_of(plan, DENSE, 8)} == {"EXACTMOE_TILE=16"}
    line = first_line(plan, A16, ("bf16",) * 3, found)
    assert "dense gate_up: kernels/cuda/dense.cu, 8 tokens x 32 rows, k 128, clusters of 1" in line


@pytest.mark.parametrize(
    ("missing", "reason", "taken"),
    [
        ("triton", "triton is not installed: pip install 'exactmoe[cuda]'", None),
        ("cuda.bindings.nvrtc", "cuda-bindings is not installed: pip install", "triton"),
    ],
)
def test_a_missing_package_is_named(missing, reason, taken, machine, monkeypatch):
    monkeypatch.setattr(module, "_importable", lambda name: name != missing)
    if taken is None:
        with pytest.raises(Unsupported, match="triton is not installed"):
            choose(A16, CARD, "auto", EXPERTS)
    else:
        plan = choose(A16, CARD, "auto", EXPERTS)
        assert plan.backend == taken
        assert reason in reasons(plan)["cuda"]


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_cpu_backend_on_a_card_is_refused(name, machine):
    with pytest.raises(Unsupported, match=f"'{name}' cannot run on cuda:0: it computes on a CPU"):
        choose(A16, CARD, name, EXPERTS)


@pytest.mark.parametrize(
    ("numerics", "path", "tiles"),
    [
        (A16, "cuda", "cuda"),
        (A8, "cuda_a8", "cuda_a8"),
        (A8_BF16, "cuda_a8_bf16", "cuda_a8"),
        (A8_FP8, "cuda_a8_fp8", "cuda_a8"),
    ],
)
def test_the_ops_and_tiles_of_a_class(numerics, path, tiles, machine):
    """And every path has the storage that its name says."""
    plan = choose(numerics, CARD, "auto", EXPERTS)
    assert (plan.backend, plan.path, plan.tiles) == ("cuda", path, tiles)
    assert "run as bf16 units" not in plan.reason
    kind = importlib.import_module("exactmoe.ops")._PATHS[path][1]
    storage = getattr(importlib.import_module("exactmoe.ops.cuda_path"), kind).storage
    assert storage.units == ("" if numerics is A16 else numerics.units)
    assert storage.layout == ("fragment" if "bf16" in numerics.units else "fragment_fp8")


def test_other_backends_have_one_path(machine):
    machine("sm_80")
    plan = choose(A8, CARD, "auto", EXPERTS)
    assert (plan.backend, plan.path, plan.tiles, plan.units) == ("triton",) * 3 + ("auto",)
    plan = choose(A8, torch.device("cpu"))
    assert (plan.backend, plan.path, plan.tiles, plan.units) == ("cpu",) * 3 + ("auto",)
    assert choose(A16, CARD, "triton", EXPERTS).units == ""


@pytest.mark.parametrize("numerics", [A8, A8_FP8], ids=["auto", "fp8"])
def test_portable_kernels_have_no_fp8_units(numerics, machine):
    """Where FP4 experts may take them, the portable path would give other bits."""
    said = (
        f"units={numerics.units!r} may take the fp8 units on sm_90, which give other bits "
        "and which it has no kernels for; it runs units='bf16'"
    )
    plan = choose(numerics, CARD, "auto", EXPERTS)
    assert reasons(plan)["triton"] == said
    with pytest.raises(Unsupported, match=r"'triton' cannot run on cuda:0: .*allowed: auto, cuda$"):
        choose(numerics, CARD, "triton", EXPERTS)
    down = (WeightShape("bf16", 256, 128),) * 2 + (WeightShape("mxfp4", 128, 256),)
    with pytest.raises(Unsupported, match="fp8 units on sm_90, which give other bits"):
        choose(numerics, CARD, "auto", down)


@pytest.mark.parametrize(
    ("numerics", "experts"),
    [
        (A8_BF16, EXPERTS),
        (A16, EXPERTS),
        (A8, (WeightShape("bf16", 256, 128),) * 3),
        (A8_FP8, (WeightShape("fp8", 256, 128),) * 3),
        (A8, ()),
    ],
)
def test_portable_kernels_run_what_only_the_bf16_units_take(numerics, experts, machine):
    assert choose(numerics, CARD, "triton", experts).backend == "triton"


@pytest.mark.parametrize("name", ["sm_80", "gfx942"])
@pytest.mark.parametrize("units", ["auto", "fp8"])
def test_units_are_named(units, name, machine):
    """Where the table has no fp8 row, all run on the bf16 units."""
    machine(name)
    plan = choose(replace(A8, units=units), CARD, "auto", EXPERTS)
    assert plan.backend == "triton"
    assert f"units={units!r} run as bf16 units on {name} (contract section 3)" in plan.reason
    assert "units" not in choose(A8_BF16, CARD, "auto", EXPERTS).reason
    plan = choose(replace(A8, units=units), torch.device("cpu"))
    assert f"units={units!r} run as bf16 units on a CPU" in plan.reason


def test_the_only_fp8_row(machine):
    """A row names an instruction only where kernels take it; its k step is 32."""
    rows = {row.name: row.fp8_instruction for row in ARCHITECTURES.values() if row.fp8_instruction}
    assert rows == {"sm_90": "wgmma m64nNk32"}


SHAPES = (WeightShape("nvfp4", 512, 256), WeightShape("nvfp4", 512, 256))
SHAPES = (*SHAPES, WeightShape("nvfp4", 256, 512))


@pytest.fixture
def sm_90(machine, monkeypatch):
    explain = importlib.import_module("exactmoe.plan.explain")
    monkeypatch.setattr(explain, "architecture_name", lambda device: "sm_90")


def test_tiles_of_a_plan(sm_90):
    plan = choose(A16, CARD, "auto", EXPERTS)
    tiles = tiles_of(plan, A16, SHAPES, 64, (8,))
    assert [c.op for c in tiles] == ["gate_up", "down"]
    assert {c.kernel for c in tiles} == {"kernels/cuda/experts.cu"}
    dense = dense_tiles_of(plan, {"gate_up": SHAPES[0], "down": SHAPES[2]}, 64)
    assert [(c.op, c.kernel) for c in dense] == [
        ("dense gate_up", "kernels/triton/dense_mlp.py"),
        ("dense down", "kernels/triton/dense_mlp.py"),
    ]
    plan = choose(A16, torch.device("cpu"))
    assert tiles_of(plan, A16, SHAPES, 64, (8,)) == ()
    assert dense_tiles_of(plan, {"down": SHAPES[2]}, 64) == ()


def test_tiles_in_chains_are_those_that_run(sm_90):
    """Class a8 and fp8 weights: the table's 128 tokens are 64 on the card."""
    plan = choose(A8_BF16, CARD, "triton", SHAPES)
    fp8 = tuple(shape._replace(format="fp8") for shape in SHAPES)
    half = (SHAPES[0], SHAPES[1], fp8[2])
    plain = tiles_of(plan, A16, SHAPES, 10_000, (8,))
    assert [c.tile.tokens for c in plain] == [128, 128]
    for numerics, shapes, tokens in (
        (A8_BF16, SHAPES, [64, 64]),
        (A16, fp8, [64, 64]),
        (A16, half, [128, 64]),
    ):
        found = tiles_of(plan, numerics, shapes, 10_000, (8,))
        assert [c.tile.tokens for c in found] == tokens
        assert [c.tile.rows for c in found if c.tile.tokens == 64][-1:] == [64]
        assert all("cut from 128 tokens" in c.reason for c in found if c.tile.tokens == 64)
        assert [c.kernel for c in found] == ["kernels/triton/gate_up.py", "kernels/triton/down.py"]
    (narrow, _) = tiles_of(plan, A8_BF16, SHAPES, 8, (8,))
    assert narrow.reason.endswith("in chains of 128")


@pytest.mark.parametrize("numerics", [A8, A8_BF16, A8_FP8], ids=lambda numerics: numerics.units)
def test_tiles_of_the_fast_path_in_class_a8(numerics, sm_90):
    """The widest is for the fp8 units."""
    plan = choose(numerics, CARD, "auto", SHAPES)
    for slots, tokens in ((8, 8), (10_000, 64 if numerics is A8_BF16 else 112)):
        found = tiles_of(plan, numerics, SHAPES, slots, (8,))
        assert [c.tile.tokens for c in found] == [tokens, tokens]
        assert {c.kernel for c in found} == {"kernels/cuda/experts.cu"}
        assert all("cut" not in c.reason for c in found)
    plan = choose(A16, CARD, "auto", SHAPES)
    assert [c.tile.tokens for c in tiles_of(plan, A16, SHAPES, 10_000, (8,))] == [128, 128]


def test_cards_of_different_tiles_are_told_apart(sm_90):
    plan = choose(A16, CARD, "triton", EXPERTS)
    alike = tiles_of(plan, A16, SHAPES, 64, (4, 4))
    assert [c.op for c in alike] == ["gate_up", "down"]
    apart = tiles_of(plan, A16, SHAPES, 64, (1, 64))
    assert [c.op for c in apart] == [
        "gate_up of card 0", "down of card 0", "gate_up of card 1", "down of card 1",
    ]  # fmt: skip
    assert [c.tile.tokens for c in apart] == [64, 64, 16, 16]


def test_the_first_line(sm_90):
    plan = choose(A16, CARD, "triton", EXPERTS)
    tiles = tiles_of(plan, A16, SHAPES, 64, (8,))
    line = first_line(plan, A16, ("nvfp4",) * 3, tiles)
    assert line.startswith(
        "backend triton on cuda:0 runs nvfp4, nvfp4, nvfp4: gate_up: kernels/triton/gate_up.py, "
    )
    assert "numerics: activation a16, units bf16, slot bf16, output bf16, router f32" in line
    assert " | not cpu: it computes on a CPU" in line
    assert "\n" not in line
    plan = choose(A16, torch.device("cpu"))
    assert "compiled loops of kernels/cpu" in first_line(plan, A16, ("bf16",), ())


def test_cards_of_two_architectures(machine):
    cards = [CARD, torch.device("cuda", 1)]
    machine("sm_90", "sm_90")
    require_one_architecture(cards)
    machine("sm_90", "sm_80")
    with pytest.raises(ConfigError, match=r"cuda:0 \(sm_90\), cuda:1 \(sm_80\); allowed: one arch"):
        require_one_architecture(cards)


@pytest.mark.parametrize(
    ("hip", "properties", "name"),
    [
        (None, {"major": 9, "minor": 0}, "sm_90"),
        (None, {"major": 12, "minor": 1}, "sm_121"),
        ("6.4", {"gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942"),
    ],
)
def test_names_of_architectures(hip, properties, name, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", hip)
    found = types.SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert architectures.architecture_name(CARD) == name
    assert architectures.architecture_name(torch.device("cpu")) == "cpu"


def test_gate_and_up_of_two_formats_are_refused(machine):
    machine("sm_90")
    mixed = (EXPERTS[0], EXPERTS[1]._replace(format="mxfp4"), EXPERTS[2])
    said = "cuda: gate is nvfp4 and up is mxfp4; .*triton: gate is nvfp4 and up is mxfp4; it takes"
    with pytest.raises(Unsupported, match=said):
        choose(A16, CARD, "auto", mixed)
