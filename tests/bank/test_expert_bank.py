"""ExpertBank: packed bytes that may move but never change, and quantize_experts."""

import copy
import pickle

import pytest
import torch

from exactmoe import ExpertBank, PackedWeight, quantize_experts
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import quantize_mxfp4, quantize_nvfp4
from layers import FORMATS, assert_same_bits, fp8_blocks, normal, random_bank

HIDDEN, INNER, EXPERTS = 64, 32, 3


@pytest.fixture(params=[*FORMATS, "bf16", "fp8"])
def bank(request, rng) -> ExpertBank:
    if request.param in FORMATS:
        return random_bank(rng, request.param, EXPERTS, HIDDEN, INNER)
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    values = [normal(rng, EXPERTS, *size) for size in sizes]
    if request.param == "fp8":
        return ExpertBank(*(fp8_blocks(value) for value in values))
    return ExpertBank(*(PackedWeight("bf16", value) for value in values))


def state(bank: ExpertBank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in bank.state_dict().items()}


def assert_same_state(bank: ExpertBank, expected: dict[str, torch.Tensor]) -> None:
    assert bank.state_dict().keys() == expected.keys()
    for name, tensor in bank.state_dict().items():
        assert_same_bits(tensor, expected[name])
    for name in ("gate", "up", "down"):
        weight = getattr(bank, name)
        assert_same_bits(weight.codes, expected[f"{name}_codes"])
        if weight.scales is not None:
            assert_same_bits(weight.scales, expected[f"{name}_scales"])
        if weight.global_scale is not None:
            assert_same_bits(weight.global_scale, expected[f"{name}_global_scale"])


def test_sizes_and_bytes(bank):
    assert (bank.num_experts, bank.hidden_size, bank.intermediate_size) == (EXPERTS, HIDDEN, INNER)
    assert bank.device == torch.device("cpu")
    numbers = EXPERTS * 3 * HIDDEN * INNER
    per_format = {
        "nvfp4": numbers // 2 + numbers // 16 + EXPERTS * 3 * 4,
        "mxfp4": numbers // 2 + numbers // 32,
        "bf16": numbers * 2,
        "fp8": numbers + EXPERTS * 3 * 4,  # one block each
    }
    assert bank.nbytes == per_format[bank.gate.format]
    assert bank.formats == (bank.gate.format,) * 3
    assert str(bank.nbytes) in repr(bank)


CHANGES = [
    lambda b: b.to(torch.bfloat16),
    lambda b: b.half(),
    lambda b: b.float(),
    lambda b: b.to("cpu", torch.float64),
    lambda b: b.bfloat16().cpu().share_memory(),
    lambda b: copy.deepcopy(b),
    lambda b: pickle.loads(pickle.dumps(b)),
    lambda b: torch.nn.Sequential(b).to(torch.bfloat16)[0],
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_move_changes_a_byte(change, bank):
    expected = state(bank)
    assert_same_state(change(bank), expected)


def test_nothing_is_copied(rng):
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    parts = [torch.nn.Parameter(normal(rng, EXPERTS, *size)) for size in sizes]
    bank = ExpertBank(*(PackedWeight("bf16", part) for part in parts))
    for name, part in zip(("gate", "up", "down"), parts, strict=True):
        assert getattr(bank, name).codes.data_ptr() == part.data_ptr()
        assert not getattr(bank, name).codes.requires_grad
    assert not list(bank.parameters())


def test_fp8_scales_may_be_parameters(rng):
    weight = fp8_blocks(torch.randn(EXPERTS, 64, 64, generator=rng))
    scales = torch.nn.Parameter(weight.scales)
    bank = ExpertBank(*[PackedWeight("fp8", weight.codes, scales)] * 3)
    assert bank.up.scales.data_ptr() == scales.data_ptr()
    assert not bank.up.scales.requires_grad and not list(bank.parameters())


def test_a_copy_has_its_own_memory(bank):
    expected = state(bank)
    other = copy.deepcopy(bank)
    bank.gate_codes.zero_()
    assert_same_state(other, expected)


def test_state_dict_round_trip(bank, tmp_path):
    expected = state(bank)
    torch.save(bank.state_dict(), tmp_path / "bank.pt")
    for assign in (False, True):
        other = copy.deepcopy(bank)
        for name in ("gate", "up", "down"):
            getattr(other, f"{name}_codes").zero_()
        other.prepared("gate", "a test", lambda weight: weight)
        other.load_state_dict(torch.load(tmp_path / "bank.pt"), assign=assign)
        assert_same_state(other, expected)
        fresh = other.prepared("gate", "a test", lambda weight: weight)
        assert_same_bits(fresh.codes, expected["gate_codes"])


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_another_type_is_refused(assign, bank):
    expected = state(bank)
    for name, tensor in expected.items():
        changed = {**expected, name: tensor.to(torch.float64)}
        with pytest.raises(ConfigError, match=rf"{name} is torch\.float64.*{tensor.dtype}"):
            bank.load_state_dict(changed, assign=assign)
    assert_same_state(bank, expected)


@pytest.mark.parametrize(
    ("format", "name", "value", "message"),
    [
        ("nvfp4", "gate_scales", 0x7F, "0x7F at expert 1, row 2, block 1"),
        ("nvfp4", "up_scales", 0x80, "0x80 at expert 1, row 2, block 1"),
        ("nvfp4", "down_scales", 0xFF, "0xFF at expert 1, row 2, block 1"),
        ("mxfp4", "up_scales", 0xFF, "0xFF .*expert 1, row 2, block 1"),
        ("fp8", "up_scales", -2.0, r"-2\.0 at expert 1, row 256, block 1"),
        ("fp8", "down_codes", 0xFF, "0xFF .NaN. at expert 1, row 2, block 0, column 1"),
    ],
)
def test_a_state_dict_with_corrupted_bytes_is_refused(format, name, value, message, rng):
    if format == "fp8":
        values = torch.randn(3, EXPERTS, 272, 272, generator=rng)
        bank = ExpertBank(*(fp8_blocks(value) for value in values))
    else:
        bank = random_bank(rng, format, EXPERTS, 64, 64)
    changed = state(bank)
    changed[name][1, 2, 1] = value
    with pytest.raises(ConfigError, match=message):
        bank.load_state_dict(changed)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_state_dict_with_a_corrupted_global_scale_is_refused(value, rng):
    bank = random_bank(rng, "nvfp4", EXPERTS, 64, 32)
    changed = state(bank)
    changed["up_global_scale"][2] = value
    with pytest.raises(ConfigError, match="global scale of expert 2"):
        bank.load_state_dict(changed)


def test_weights_that_do_not_fit_are_refused(rng):
    bank = random_bank(rng, "nvfp4", 2, 64, 32)
    other = random_bank(rng, "nvfp4", 3, 64, 32)
    wide = random_bank(rng, "nvfp4", 2, 64, 64)
    for parts, message in (
        ((bank.gate, other.up, bank.down), r"up is \(3, 32, 64\).*\(2, 32, 64\)"),
        ((bank.gate, bank.up, wide.down), r"down is \(2, 64, 64\).*\(2, 64, 32\)"),
        ((bank.gate, bank.up, bank.up), r"down is \(2, 32, 64\).*\(2, 64, 32\)"),
        ((bank.gate, bank.gate.codes, bank.down), "up is Tensor.*PackedWeight"),
    ):
        with pytest.raises(ConfigError, match=message):
            ExpertBank(*parts)


def test_formats_may_differ_between_projections(rng):
    nvfp4, mxfp4 = (random_bank(rng, f, 2, 64, 32) for f in FORMATS)
    assert ExpertBank(nvfp4.gate, mxfp4.up, nvfp4.down).formats == ("nvfp4", "mxfp4", "nvfp4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_experts_quantises_each_projection(dtype, rng):
    gate, up = (torch.randn(2, 32, 64, generator=rng).to(dtype) for _ in range(2))
    down = torch.randn(2, 64, 32, generator=rng).to(dtype)
    for format, one in (("nvfp4", quantize_nvfp4), ("mxfp4", quantize_mxfp4)):
        bank = quantize_experts(gate, up, down, format)
        for found, weight in zip((bank.gate, bank.up, bank.down), (gate, up, down), strict=True):
            assert_same_bits(found.codes, one(weight).codes)
            assert_same_bits(found.scales, one(weight).scales)
    ruled = quantize_experts(gate, up, down, "mxfp4", "no_clip")
    assert_same_bits(ruled.up.codes, quantize_mxfp4(up, "no_clip").codes)


def test_quantize_experts_refuses(rng):
    gate, down = torch.randn(2, 32, 64, generator=rng), torch.randn(2, 64, 32, generator=rng)
    broken = gate.clone()
    broken[1, 3, 5] = float("inf")
    for arguments, error, message in (
        ((gate, gate, down, "fp4"), ConfigError, "format is 'fp4'.*nvfp4, mxfp4"),
        ((gate, gate, down, "nvfp4", "ocp"), ConfigError, "rule is 'ocp'.*modelopt"),
        ((gate, broken, down, "nvfp4"), ConfigError, "inf at expert 1, row 3, column 5"),
        ((gate, gate.double(), down, "nvfp4"), ConfigError, r"torch\.float64"),
        ((gate, gate, gate, "nvfp4"), ConfigError, r"down is \(2, 32, 64\)"),
        ((gate[..., :8], gate, down, "nvfp4"), Unsupported, "k is 8.*16"),
    ):
        with pytest.raises(error, match=message):
            quantize_experts(*arguments)
