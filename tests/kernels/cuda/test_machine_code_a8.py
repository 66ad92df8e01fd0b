"""Machine code of the experts kernel of class a8 on sm_90: each chain of 128 along k on the units
that the variant says, begun at +0 by its first instruction, and added by one fused step. It shows
what the compiler made; tests/gpu show that it runs.
"""

import re
from collections import Counter

import pytest

from cuda_code import Code, a8_variants, code, name, variant_name
from exactmoe.kernels.cuda import compile as compiler
from exactmoe.kernels.cuda.source import THREADS, UNITS, Pack, Variant
from exactmoe.kernels.cuda.wgmma import widths
from in_flight import overwritten

pytest.importorskip("triton", reason="its cuobjdump reads machine code")
pytestmark = pytest.mark.skipif(
    compiler.missing() is not None, reason=f"no NVRTC: {compiler.missing()}"
)


def variant_of(format: str, tokens: int, units: str) -> Variant:
    return Variant(format, tokens, units == "fp8" and tokens <= 16, True, "a8", units)


# Both formats, all units, gathered rows and packed ones.
QUICK = {
    variant_of("mxfp4", 8, "fp8"),
    variant_of("nvfp4", 16, "fp8"),
    variant_of("nvfp4", 8, "both"),
    variant_of("mxfp4", 16, "bf16"),
    variant_of("nvfp4", 40, "fp8"),
}
# Loads and stores of spilled words in all loops of the matrix units, at most. On both kinds of
# units, 16 tokens keep the next stage's operands beside those of a bf16 chain: what a lane knows of
# its item does not fit beside them.
SPILLED = {variant_of("nvfp4", 16, "both"): 7, variant_of("mxfp4", 16, "both"): 2}
every_variant = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=() if v in QUICK else pytest.mark.long, id=variant_name(v))
        for v in a8_variants()
    ],
)
# kind of units -> matrix instruction, its k, and how many make a chain of 128.
MATRIX = {
    "fp8": ("QGMMA", "32", "E4M3.E4M3", 4),
    "bf16": ("HGMMA", "16", "BF16", 8),
}
# Scale-d false: the accumulator is not read.
FROM_ZERO = "RZ, !UPT"
SM_REGISTERS, SM_SHARED = 65536, 233472
FILLING_WARPS = 4
# Two float32 to e4m3, to nearest even, saturating.
ROUNDED = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
WHOLE = "F2I.FTZ.U32.TRUNC.NTZ"  # u32 / u32 starts from a float32 reciprocal


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXACTMOE_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


def batches(variant: Variant) -> int:
    """The widest tile takes its tokens in two, with one set of operands."""
    return 2 if variant.tokens > 64 else 1


def kinds(variant: Variant) -> tuple[str, ...]:
    return ("fp8", "bf16") if variant.units == "both" else (variant.units,)


def chains(variant: Variant, machine: Code) -> dict[tuple[str, int], list[int]]:
    """Places of the matrix instructions, by kind and width; all are of one of the kinds."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, text in enumerate(machine.main):
        if "MMA" not in name(text):
            continue
        for kind in kinds(variant):
            unit, k, types, _ = MATRIX[kind]
            pattern = (
                rf"{unit}\.64x(\d+)x{k}\.F32\.{types} (R\d+), R\d+, gdesc\[UR\d+\], "
                rf"(?:{FROM_ZERO}|\2)(, gsb0)?"
            )
            match = re.fullmatch(pattern, text)
            if match is not None:
                found.setdefault((kind, int(match[1])), []).append(place)
                break
        else:
            raise AssertionError(f"{text} is no instruction of {variant.units} units")
    return found


def test_the_quick_ones_are_launched():
    assert set(a8_variants()) >= QUICK


@every_variant
def test_each_chain_is_of_its_units_and_begins_at_zero(variant):
    """m64nNk32 e4m3 four times, m64nNk16 bf16 eight times: one loop a width and kind, whose first
    instruction reads no accumulator, and the others that of the first.
    """
    machine = code(variant)
    found = chains(variant, machine)
    offered = [width // batches(variant) for width in widths(variant.tokens, batches(variant))]
    assert set(found) == {(k, width) for k in kinds(variant) for width in offered}
    for (kind, width), places in found.items():
        count = MATRIX[kind][3]
        assert len(places) == count * batches(variant), (kind, width)
        texts = [machine.main[place] for place in places]
        from_zero = [True] + [False] * (count - 1)
        assert [FROM_ZERO in text for text in texts] == from_zero * batches(variant)
        assert len({text.split()[1] for text in texts}) == 1, "one accumulator"
        body = machine.loop(places[0], places[-1])
        inside = [place for place in body if "MMA" in name(machine.main[place])]
        assert inside == places, "a loop of its own"


@every_variant
def test_no_operand_is_overwritten_while_it_is_read(variant):
    assert overwritten(code(variant)) == []


@every_variant
def test_a_chain_is_added_by_one_fused_step(variant):
    """acc = fma(chain, scale, acc): in each loop one FFMA a sum, and no other addition."""
    machine = code(variant)
    for (kind, width), places in chains(variant, machine).items():
        body = machine.loop(places[0], places[-1])
        counts = Counter(name(machine.main[place]) for place in body)
        assert counts["FFMA"] == width // 2 * batches(variant), (kind, width)
        assert counts["FADD"] == counts["DADD"] == counts["DFMA"] == 0
        assert not [kind for kind in counts if kind.startswith(("FFMA.", "FADD.", "FMUL."))]


@every_variant
def test_no_spills_where_the_matrix_units_work(variant):
    """A few words are spilled in the epilogue of wide tiles; none in a loop over stages but those
    of SPILLED, and none at all of narrow tiles (16 tokens on the bf16 units keep operands of the
    next stage too, and are wide).
    """
    machine = code(variant)
    local = {place for place, text in enumerate(machine.main) if re.match("STL|LDL", text)}
    if variant.tokens <= (16 if variant.units == "fp8" else 8):
        assert machine.stack == 0 and not local
    loops = [machine.loop(places[0], places[-1]) for places in chains(variant, machine).values()]
    assert sum(len(local & set(body)) for body in loops) <= SPILLED.get(variant, 0)


@every_variant
def test_registers_and_shared_memory_of_a_block_fit(variant):
    """Else it could not be launched, or would wait for registers for ever."""
    machine = code(variant)
    at_start = -(-machine.registers // 8) * 8
    assert at_start * THREADS <= SM_REGISTERS
    taken = {name(t).split(".")[1]: int(t.split()[-1], 16) for t in machine.main if "SETMAX" in t}
    assert bool(taken) == (variant.tokens >= 16)
    if taken:
        multiplying = THREADS // 32 - FILLING_WARPS
        total = FILLING_WARPS * taken["DEALLOC"] + multiplying * taken["TRY_ALLOC"]
        assert 32 * total <= at_start * THREADS
    assert machine.shared + variant.shared_bytes <= SM_SHARED


@every_variant
def test_weights_come_in_bulk_and_are_read_16_bytes_at_a_time(variant):
    machine = code(variant)
    for places in chains(variant, machine).values():
        body = machine.loop(places[0], places[-1])
        loads = Counter(name(machine.main[place]) for place in body)
        assert loads["LDS.128"] == 2, "codes of both panels"
        assert not [kind for kind in loads if kind.startswith("LDG")]
    counts = machine.counts
    assert counts["UBLKCP.S.G"] >= 3  # weights, packed rows and their scales
    copies = {kind for kind in counts if kind.startswith("LDGSTS")}
    # Slots of 4 bytes; codes of gathered rows.
    assert copies == {"LDGSTS.E"} | ({"LDGSTS.E.BYPASS.128"} if variant.gather else set())


@every_variant
def test_arithmetic_is_that_of_the_contract(variant):
    """Nothing is flushed or approximate; only divisions, exp and the additions of chains are
    fused; e4m3 codes are rounded in pairs.
    """
    machine = code(variant)
    counts = machine.counts
    assert {kind for kind in counts if "FTZ" in kind} <= {WHOLE}
    assert {kind for kind in counts if kind.startswith("MUFU")} <= {"MUFU.RCP"}
    assert {kind for kind in counts if kind.startswith("FMNMX")} <= {"FMNMX.NAN"}
    divisions, exps, tokens = counts["FCHK"], counts["FRND"], variant.tokens
    # As in test_machine_code.py.
    epilogues, h = 2 if variant.format == "nvfp4" else 1, tokens // 4
    assert divisions == machine.calls == (h + h * 5 if variant.format == "nvfp4" else h)
    assert exps == h * epilogues
    sums = sum(width // 2 for width in widths(tokens, batches(variant))) * len(kinds(variant))
    # Narrow tiles add a chain while the next one runs, so the last one behind their loop.
    chains_added = counts["FFMA"] - 5 * divisions - 9 * exps
    assert sums <= chains_added <= 2 * sums
    assert counts["FADD"] == exps  # 1 + exp(-g)
    found = {kind for kind in counts if re.match(r"FFMA|FADD|FMUL|HFMA|HADD", kind)}
    assert found <= {"FFMA", "FADD", "FMUL", "HADD2.F32"}
    # float16 as float32: e4m3 codes of h on their way to bf16, where down's experts want them.
    widened = [text for text in machine.main if name(text) == "HADD2.F32"]
    assert all(
        re.fullmatch(r"HADD2\.F32 R\d+, -RZ, R\d+(\.reuse)?\.H[01]_H[01]", t) for t in widened
    )
    assert bool(widened) == (variant.units != "fp8")
    assert counts[ROUNDED] == tokens // 8 * epilogues
    kinds_of_e4m3 = {kind for kind in counts if kind.startswith("F2F") and "E4M3" in kind}
    assert kinds_of_e4m3 <= {ROUNDED, "F2FP.F16.E4M3.UNPACK_B"}


@pytest.mark.parametrize("units", UNITS)
def test_pack_copies_16_bytes(units):
    """And one scale of 4; codes become bf16 where the bf16 units read them."""
    counts = code(Pack("a8", units)).counts
    assert counts["LDG.E.128"] > 0 and counts["STG.E.128"] > 0
    stores = {kind for kind in counts if kind.startswith("STG")}
    assert stores == {"STG.E.128", "STG.E"}
    assert not [kind for kind in counts if re.match(r"F(FMA|ADD|MNMX|CHK)|DFMA", kind)]
    assert code(Pack("a8", units)).stack == 0
