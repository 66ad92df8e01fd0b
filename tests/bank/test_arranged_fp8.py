"""A bank in the order of the fp8 matrix units: each expert and projection as its bytes allow, and
whoever else reads it gets canonical bytes.
"""

import copy
import pickle

import pytest
import torch

from arranged_paths import LAYOUTS, arranged_backend
from exactmoe import ExpertBank, Numerics, PackedWeight, ops
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import fp8_exact, fragment
from layers import assert_same_bits, layer_of, random_bank, random_call

PROJECTIONS = ("gate", "up", "down")
NAMES = [f"{p}_{part}" for p in PROJECTIONS for part in ("codes", "scales")]
A8 = Numerics.preset("a8")
# Of each projection, the experts that the fp8 units hold.
KINDS = {"gate": [True, False, True], "up": [False, True, True], "down": [True, False, False]}
ALL = dict.fromkeys(PROJECTIONS, [True] * 3)
NONE = dict.fromkeys(PROJECTIONS, [False] * 3)


def bank_of(rng: torch.Generator, format: str, kinds: dict[str, list[bool]] = KINDS) -> ExpertBank:
    """Three experts [256, 128] of both kinds; those of the fp8 units have blocks of zeros whose
    scales are no power of two, or far from the others.
    """
    bank = random_bank(rng, format, 3, 256, 128)
    for name, exact in kinds.items():
        weight = getattr(bank, name)
        for expert, fits in enumerate(exact):
            codes, scales = weight.codes[expert], weight.scales[expert]
            codes[codes == 0] = 1
            if fits:
                powers = torch.randint(3, 12, scales.shape, generator=rng)
                scales.copy_(powers << 3 if format == "nvfp4" else 110 + powers)
                codes[5, :16] = 0x80  # a block of zeros, of both signs
                scales[5, 0] = 0x3B if format == "nvfp4" else 3
            else:
                scales[7, 0], scales[7, 1] = (0x3B, 0x38) if format == "nvfp4" else (127, 112)
    bank.refresh()
    assert {name: fp8_exact(getattr(bank, name)).tolist() for name in kinds} == kinds
    return bank


@pytest.fixture(params=["nvfp4", "mxfp4"])
def bank(request, rng) -> ExpertBank:
    return bank_of(rng, request.param)


@pytest.fixture(params=LAYOUTS)
def backend(request, monkeypatch):
    with arranged_backend(monkeypatch, request.param):
        yield


def bytes_of(bank: ExpertBank) -> dict[str, torch.Tensor]:
    return {name: bank.get_buffer(name).clone() for name in NAMES}


def assert_bytes(found, expected) -> None:
    for name in NAMES:
        assert_same_bits(found[name], expected[name], name)


def fragments(bank: ExpertBank) -> dict[str, torch.Tensor]:
    """The bytes of all experts in plain fragment order, from a copy."""
    other = copy.deepcopy(bank)
    other.arrange("fragment")
    return bytes_of(other)


def test_each_expert_lies_as_its_units_read_it(bank):
    before, plain = bytes_of(bank), fragments(bank)
    addresses = [buffer.data_ptr() for buffer in bank.buffers()]
    versions = [buffer._version for buffer in bank.buffers()]
    bank.arrange("fragment_fp8")
    assert bank.layout == "fragment_fp8" and "layout=fragment_fp8" in repr(bank)
    for projection, exact in KINDS.items():
        for part in ("codes", "scales"):
            name = f"{projection}_{part}"
            same = [
                torch.equal(found, other)
                for found, other in zip(bank.get_buffer(name), plain[name], strict=True)
            ]
            assert same == [not fits for fits in exact], name
    for projection in PROJECTIONS:
        assert_same_bits(getattr(bank, projection).codes, before[f"{projection}_codes"])
    bank.arrange("canonical")
    assert_bytes(bytes_of(bank), before)
    assert [buffer.data_ptr() for buffer in bank.buffers()] == addresses
    assert [buffer._version for buffer in bank.buffers()] == versions


@pytest.mark.parametrize("kinds", [ALL, NONE], ids=["all", "none"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_experts_of_one_kind(format, kinds, rng):
    bank = bank_of(rng, format, kinds)
    before, plain = bytes_of(bank), fragments(bank)
    bank.arrange("fragment_fp8")
    found = bytes_of(bank)
    assert all(torch.equal(found[n], plain[n]) == (kinds is NONE) for n in NAMES)
    assert_bytes(bank.state_dict(), before)


def test_from_fragment_order_and_back(bank):
    before = bytes_of(bank)
    straight = copy.deepcopy(bank)
    straight.arrange("fragment_fp8")
    bank.arrange("fragment")
    plain = bytes_of(bank)
    bank.arrange("fragment_fp8")
    assert_bytes(bytes_of(bank), bytes_of(straight))
    bank.arrange("fragment_fp8")
    assert_bytes(bytes_of(bank), bytes_of(straight))
    bank.arrange("fragment")
    assert bank.layout == "fragment"
    assert_bytes(bytes_of(bank), plain)
    bank.arrange("canonical")
    assert_bytes(bytes_of(bank), before)


def test_what_leaves_the_bank_is_canonical(bank, tmp_path):
    before, plain = bytes_of(bank), fragments(bank)
    bank.arrange("fragment_fp8")
    inside = bytes_of(bank)
    assert_bytes(bank.state_dict(), before)
    torch.save(bank, tmp_path / "bank.pt")
    for other in (
        copy.deepcopy(bank),
        pickle.loads(pickle.dumps(bank)),
        torch.load(tmp_path / "bank.pt", weights_only=False),
    ):
        assert other.layout == "canonical"
        assert_bytes(bytes_of(other), before)
        other.arrange("fragment")  # which knows of no other units
        assert_bytes(bytes_of(other), plain)
        other.arrange("fragment_fp8")
        assert_bytes(bytes_of(other), inside)
    for projection in PROJECTIONS:
        weight = getattr(bank, projection)
        assert_same_bits(weight.codes, before[f"{projection}_codes"])
        assert_same_bits(weight.scales, before[f"{projection}_scales"])
    assert bank.layout == "fragment_fp8"
    assert_bytes(bytes_of(bank), inside)


def test_loading_decides_anew_which_units(bank, rng):
    """The bytes that come may belong on other units than those that lay there."""
    other = bank_of(rng, bank.gate.format, {name: exact[::-1] for name, exact in KINDS.items()})
    expected, plain = bytes_of(other), fragments(other)
    bank.arrange("fragment_fp8")
    bank.load_state_dict(other.state_dict())
    assert bank.layout == "canonical"
    assert_bytes(bytes_of(bank), expected)
    bank.arrange("fragment")
    assert_bytes(bytes_of(bank), plain)
    bank.arrange("fragment_fp8")
    other.arrange("fragment_fp8")
    assert_bytes(bytes_of(bank), bytes_of(other))
    assert_bytes(bank.state_dict(), expected)


def test_loading_one_projection_keeps_the_others(bank, rng):
    other = bank_of(rng, bank.gate.format, ALL)
    expected = bytes_of(bank) | {n: other.get_buffer(n).clone() for n in NAMES if "up" in n}
    bank.arrange("fragment_fp8")
    some = {name: part for name, part in other.state_dict().items() if name.startswith("up")}
    bank.load_state_dict(some, strict=False)
    assert_bytes(bytes_of(bank), expected)
    bank.arrange("fragment_fp8")
    assert_bytes(bank.state_dict(), expected)


def test_writes_are_refused_and_a_global_scale_may_be_written(rng):
    bank = bank_of(rng, "nvfp4")
    before = bytes_of(bank)
    bank.arrange("fragment_fp8")
    bank.gate_global_scale.mul_(2)
    assert_same_bits(bank.gate.codes, before["gate_codes"])
    assert bank.layout == "canonical"
    bank.arrange("fragment_fp8")
    bank.up_scales[1, 0, 0] = 3
    with pytest.raises(ConfigError, match="^up_scales changed while .* in fragment_fp8 order"):
        bank.state_dict()


def test_a_call_arranges_and_gives_the_same_bits(backend, bank, rng):
    plain = layer_of(copy.deepcopy(bank), 2, "cpu", numerics=A8)
    layer = layer_of(bank, 2, "cuda", numerics=A8)
    call, before = random_call(rng, layer, 9), bytes_of(bank)
    expected = plain.experts(*call)
    assert_same_bits(layer.experts(*call), expected)
    assert (layer.plan().path, bank.layout) == ("cuda_a8", "fragment_fp8")
    assert layer.explain(3).fp8_experts == plain.explain(3).fp8_experts == (2, 2, 1)
    assert_bytes(copy.deepcopy(layer).bank.state_dict(), before)
    layer.to("cpu")
    assert_bytes(bytes_of(bank), before)
    assert_same_bits(layer.experts(*call), expected)


def test_layers_of_both_classes_do_not_share_the_order(backend, bank, rng):
    """a16 reads plain fragment order; nobody rearranges under the other."""
    wide, scaled = layer_of(bank, 2, "cuda"), layer_of(bank, 2, "cuda", numerics=A8)
    call = random_call(rng, wide, 4)
    expected = scaled.experts(*call)
    said = "'cuda' reads experts in fragment order, and these are in fragment_fp8 order"
    with pytest.raises(Unsupported, match=said):
        wide.experts(*call)
    assert_same_bits(scaled.experts(*call), expected)
    bank.arrange("canonical")
    wide.experts(*call)
    said = r"in fragment_fp8 order, and these are in fragment order .*arrange\('fragment_fp8'\)"
    with pytest.raises(Unsupported, match=said):
        scaled.experts(*call)


@pytest.fixture
def cuda_paths():
    pytest.importorskip("triton")
    return {name: ops.path(name) for name in ("cuda", "cuda_a8", "cuda_a8_bf16", "cuda_a8_fp8")}


def test_prepared_weights_say_which_experts_are_on_the_fp8_units(cuda_paths, bank):
    gate, up, down = bank.prepared_for(cuda_paths["cuda_a8"])
    assert bank.layout == "fragment_fp8"
    for weight, exact, name in zip((gate, up, down), KINDS.values(), KINDS, strict=True):
        assert weight.units == "both"
        assert weight.on_fp8.dtype == torch.uint8 and weight.on_fp8.tolist() == exact
        assert weight.codes.data_ptr() == bank.get_buffer(f"{name}_codes").data_ptr()
    assert bank.prepared_for(cuda_paths["cuda_a8"])[0] is gate
    factors = [weight.factors for weight in (gate, up, down)]
    bank.arrange("canonical")
    for name in ("cuda_a8_bf16", "cuda"):
        found = bank.prepared_for(cuda_paths[name])
        assert bank.layout == "fragment"
        assert {weight.units for weight in found} == {"bf16"}
        assert all(weight.on_fp8.tolist() == [0, 0, 0] for weight in found)
        for weight, expected in zip(found, factors, strict=True):
            assert_same_bits(weight.factors, expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_all_experts_on_the_fp8_units(format, cuda_paths, rng):
    bank = bank_of(rng, format, ALL)
    for name in ("cuda_a8_fp8", "cuda_a8"):
        found = bank.prepared_for(cuda_paths[name])
        assert {weight.units for weight in found} == {"fp8"}
        assert all(weight.on_fp8.tolist() == [1, 1, 1] for weight in found)


@pytest.mark.parametrize(
    ("projection", "exact"), [("gate", [True, False, True]), ("down", [True, True, False])]
)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_fixed_fp8_units_refuse_an_inexact_expert_by_projection_and_number(
    projection, exact, format, cuda_paths, rng
):
    bank = bank_of(rng, format, ALL | {projection: exact})
    before = bytes_of(bank)
    said = (
        rf"^{projection}: numerics.units is 'fp8', and expert {exact.index(False)} is not exact "
        r"on the fp8 units \(contract section 3\); allowed: auto, bf16$"
    )
    for _ in range(2):
        with pytest.raises(Unsupported, match=said):
            bank.prepared_for(cuda_paths["cuda_a8_fp8"])
    assert_bytes(bank.state_dict(), before)
    assert bank.layout == "canonical"
    assert_bytes(bytes_of(bank), before)
    # Also where another layer over the bank lets each expert take its own units.
    bank.prepared_for(cuda_paths["cuda_a8"])
    with pytest.raises(Unsupported, match=said):
        bank.prepared_for(cuda_paths["cuda_a8_fp8"])


def test_fixed_fp8_units_refuse_plain_fragment_order(cuda_paths, rng):
    weight = bank_of(rng, "mxfp4", ALL).gate
    copied = PackedWeight("mxfp4", weight.codes.clone(), weight.scales.clone())
    fragment.to_fragment(copied)
    with pytest.raises(Unsupported, match="'fp8', and expert 0 is not exact"):
        cuda_paths["cuda_a8_fp8"].prepare(copied)


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
@pytest.mark.parametrize("layout", ["fragment", "fragment_fp8"])
def test_a_load_that_fails_leaves_right_bytes(layout, wrong, bank):
    """A load whose tensors do not fit replaces nothing of some buffers."""
    before = bytes_of(bank)
    given = {name: tensor.clone() for name, tensor in bank.state_dict().items()}
    bank.arrange(layout)
    name = "down_codes"
    given[name] = given[name][:, :128] if wrong == "shape" else given[name].int()
    with pytest.raises((ConfigError, RuntimeError)):
        bank.load_state_dict(given)
    assert_bytes(bank.state_dict(), before)
    bank.arrange("canonical")
    assert_bytes(bytes_of(bank), before)


def test_units_are_decided_before_a_byte_moves(bank, monkeypatch):
    """What decides needs memory of its own, and may not get it."""
    before, asked = bytes_of(bank), []

    def full_at_the_second(weight):
        asked.append(weight)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("planted")
        return fp8_exact(weight)

    monkeypatch.setattr("exactmoe.bank.arranged.fp8_exact", full_at_the_second)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        bank.arrange("fragment_fp8")
    assert bank.layout == "canonical"
    assert_bytes(bytes_of(bank), before)
    bank.arrange("fragment_fp8")
    bank.arrange("canonical")
    assert_bytes(bytes_of(bank), before)


def test_the_meta_device_has_no_bytes_that_decide(bank):
    with pytest.raises(Unsupported, match="the meta device has none"):
        bank.to("meta").arrange("fragment_fp8")
