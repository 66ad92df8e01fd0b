"""Machine code of the experts kernel on sm_90, class a16: one matrix instruction, rounding as the
contract says, no spills where it matters. It shows what the compiler made; tests/gpu show that it
runs.
"""

import re
from collections import Counter

import pytest

from cuda_code import Code, code, name, variant_name, variants
from exactmoe.kernels.cuda import compile as compiler
from exactmoe.kernels.cuda.source import THREADS, Pack, Variant
from exactmoe.kernels.cuda.wgmma import widths
from in_flight import overwritten

pytest.importorskip("triton", reason="its cuobjdump reads machine code")
pytestmark = pytest.mark.skipif(
    compiler.missing() is not None, reason=f"no NVRTC: {compiler.missing()}"
)
# Both formats, both kinds of rows and of slots, and the widest tile.
QUICK = {
    Variant("nvfp4", 8, gather=True),
    Variant("mxfp4", 16, gather=True, slot_f32=True),
    Variant("mxfp4", 40),
    Variant("nvfp4", 64, slot_f32=True),
    Variant("nvfp4", 128),
}
every_variant = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=() if v in QUICK else pytest.mark.long, id=variant_name(v))
        for v in variants()
    ],
)
MATRIX = re.compile(r"HGMMA\.64x(\d+)x16\.F32\.BF16 (R\d+), R\d+, gdesc\[UR\d+\], \2(, gsb0)?")
# Of a whole number: u32 / u32 starts from a float32 reciprocal.
WHOLE = "F2I.FTZ.U32.TRUNC.NTZ"
SM_REGISTERS, SM_SHARED = 65536, 233472
FILLING_WARPS = 4
PROLOGUE = re.compile(r"BAR\.SYNC\S* 0x0$")


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXACTMOE_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


def registers_taken(machine: Code) -> tuple[int, int]:
    """Of a thread that fills the ring and one that multiplies, after they were exchanged."""
    found = {name(t).split(".")[1]: int(t.split()[-1], 16) for t in machine.main if "SETMAX" in t}
    return found.get("DEALLOC", machine.registers), found.get("TRY_ALLOC", machine.registers)


def epilogues(variant: Variant) -> int:
    """With divisions and without: an NVFP4 checkpoint may keep the reciprocals of its scales."""
    return 2 if variant.format == "nvfp4" else 1


def test_the_quick_ones_are_launched():
    assert set(variants()) >= QUICK


@every_variant
def test_one_matrix_instruction_and_one_chain(variant):
    """bf16, k 16, eight in 128 of k for each width; each adds to the sums that it was given."""
    machine = code(variant)
    found = [text for text in machine.main if "MMA" in name(text)]
    matches = [MATRIX.fullmatch(text) for text in found]
    assert all(matches), [t for t, m in zip(found, matches, strict=True) if m is None]
    assert Counter(int(m[1]) for m in matches if m) == dict.fromkeys(widths(variant.tokens), 8)
    assert machine.counts["HMUL2.BF16_V2"] == 4 * len(found)  # the scales, a pair of codes each


@every_variant
def test_no_operand_is_overwritten_while_it_is_read(variant):
    assert overwritten(code(variant)) == []


@every_variant
def test_no_spills_where_it_matters(variant):
    """None at all of narrow tiles. A wide tile may keep a few words that an item needs once; none
    of them is touched in a loop of the matrix units.
    """
    machine = code(variant)
    local = {place for place, text in enumerate(machine.main) if re.match("STL|LDL", text)}
    if variant.tokens <= 16:
        assert machine.stack == 0 and not local
    for place, text in enumerate(machine.main):
        if "MMA" in name(text):
            assert not local & set(machine.loop(place, place))


@every_variant
def test_registers_and_shared_memory_of_a_block_fit(variant):
    """Else it could not be launched, or would wait for registers for ever."""
    machine = code(variant)
    at_start = -(-machine.registers // 8) * 8
    filling, multiplying = registers_taken(machine)
    assert at_start * THREADS <= SM_REGISTERS
    if (filling, multiplying) != (machine.registers, machine.registers):
        total = 32 * (FILLING_WARPS * filling + (THREADS // 32 - FILLING_WARPS) * multiplying)
        assert total <= at_start * THREADS
    assert machine.shared + variant.shared_bytes <= SM_SHARED


@every_variant
def test_weights_come_in_bulk_and_are_read_16_bytes_at_a_time(variant):
    machine = code(variant)
    # Behind the barriers after which every warp knows its work.
    begin = [place for place, text in enumerate(machine.main) if PROLOGUE.match(text)][-1]
    counts = Counter(name(text) for text in machine.main[begin:])
    # Narrow tiles read a stage before its turn, so once more ahead of the loop.
    stages = sum(2 if width < 64 else 1 for width in widths(variant.tokens))
    panels = 1 if variant.slot_f32 else 3  # of an item of gate_up, and of down
    staged = 0 if variant.tokens < 24 else -(-variant.tokens // 32) * panels * epilogues(variant)
    assert counts["LDS.128"] == 2 * stages + staged
    scales = 2 * stages if variant.format == "nvfp4" else 0
    # Narrow tiles read their slots where they need them, others copy them ahead.
    held = variant.tokens > 16
    slots = variant.tokens // 8 * epilogues(variant) if held and variant.slot_f32 else 0
    assert counts["LDS.64"] == scales + slots
    assert counts["UBLKCP.S.G"] >= 2  # weights and packed rows
    copies = {kind for kind in counts if kind.startswith("LDGSTS")}
    assert copies == ({"LDGSTS.E"} if held else {"LDGSTS.E.BYPASS.128"})
    assert held == (not variant.gather)


@every_variant
def test_nothing_is_flushed_to_zero_or_approximate(variant):
    machine = code(variant)
    assert {kind for kind in machine.counts if "FTZ" in kind} <= {WHOLE}
    # Looks at operands, and adds two of which one is a NaN, or flips the sign of a normal number.
    allowed = {"FSETP.GTU.FTZ.AND", "FSETP.NEU.FTZ.AND", "FADD.FTZ"}
    assert {name(text) for text in machine.division if "FTZ" in text} <= allowed
    assert {kind for kind in machine.counts if kind.startswith("MUFU")} == {"MUFU.RCP"}
    assert {kind for kind in machine.counts if kind.startswith("FMNMX")} <= {"FMNMX.NAN"}


@every_variant
def test_divisions_are_exact_and_only_they_and_exp_are_fused(variant):
    """A division is a reciprocal, five fused steps, and a check that calls a routine for the ends
    of float32; exp32 has nine fused steps. Sums are never added outside of the matrix units.
    """
    machine = code(variant)
    counts, routine = machine.counts, {name(text) for text in machine.division}
    divisions, exps, h = counts["FCHK"], counts["FRND"], variant.tokens // 4
    # Of NVFP4, gate, up and two panels of down are divided as well, in an epilogue of its own.
    assert divisions == machine.calls == (h + h * 5 if variant.format == "nvfp4" else h)
    assert counts["MUFU.RCP"] == divisions + counts[WHOLE]
    assert {"MUFU.RCP", "FFMA.RZ", "FFMA.RM", "FFMA.RP", "RET.REL.NODEC"} <= routine
    assert exps == h * epilogues(variant)
    assert counts["FFMA"] == 5 * divisions + 9 * exps
    assert counts["FADD"] == exps  # 1 + exp(-g)
    assert counts["FMNMX.NAN"] == 5 * exps
    kinds = {kind for kind in counts if re.match(r"FFMA|FADD|FMUL|HFMA|HADD", kind)}
    assert kinds <= {"FFMA", "FADD", "FMUL"}


def test_pack_copies_16_bytes_and_computes_nothing():
    machine = code(Pack())
    counts = machine.counts
    assert counts["STG.E.128"] == counts["LDG.E.128"] > 0
    assert not [kind for kind in counts if re.match(r"STG", kind) and kind != "STG.E.128"]
    assert not [kind for kind in counts if re.match(r"F(FMA|ADD|MUL|MNMX|CHK)|H|DFMA", kind)]
    assert machine.stack == 0
