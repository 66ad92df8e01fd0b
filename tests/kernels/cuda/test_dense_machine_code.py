"""Machine code of the dense kernels on sm_90: one matrix instruction, k ascending on one chain,
rounding as the contract says, weights by tensor copies, no spills. It needs no card.
"""

import re
from collections import Counter

import pytest

from cuda_code import Code, code, name
from exactmoe.kernels.cuda import compile as compiler
from exactmoe.kernels.cuda.dense import Dense
from exactmoe.ops.cuda.dense_mlp import variant_of
from exactmoe.plan.dense_tiles import DENSE_TILES, WIDEST_SEGMENTED

pytest.importorskip("triton", reason="its cuobjdump reads machine code")
pytestmark = pytest.mark.skipif(
    compiler.missing() is not None, reason=f"no NVRTC: {compiler.missing()}"
)
SHORT, LONG = 4096, 12288
VARIANTS = [
    variant_of(op, k, tile)
    for op in ("gate_up", "down")
    for k in (SHORT, LONG)
    for tile in DENSE_TILES
    if k == SHORT or tile.tokens <= WIDEST_SEGMENTED
]
# (op, rows, tokens, segmented): narrow and wide, one and several blocks that share.
QUICK = {
    ("gate_up", 32, 8, False),
    ("gate_up", 128, 256, False),
    ("down", 32, 16, True),
    ("down", 128, 128, True),
    ("down", 64, 64, False),
}
MATRIX = re.compile(r"HGMMA\.64x(\d+)x16\.F32\.BF16 (R\d+), gdesc\[UR\d+\], \2(, gsb0)?")
SM_REGISTERS, SM_SHARED = 65536, 233472
# Of a whole number: u32 / u32 starts from a float32 reciprocal.
WHOLE = "F2I.FTZ.U32.TRUNC.NTZ"


def is_quick(variant: Dense) -> bool:
    return (variant.op, variant.rows, variant.tokens, variant.segmented) in QUICK


def label(variant: Dense) -> str:
    segmented = " segmented" * variant.segmented
    size = f"{variant.tokens}x{variant.rows} k{64 * variant.chunks}"
    return f"{variant.op} {size} c{variant.cluster} b{variant.blocks}{segmented}"


every_variant = pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if is_quick(v) else pytest.mark.long, id=label(v)) for v in VARIANTS],
)


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXACTMOE_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


def registers_taken(machine: Code) -> tuple[int, int]:
    """Of a thread that fills the ring and one that multiplies, after they were exchanged."""
    found = {name(t).split(".")[1]: int(t.split()[-1], 16) for t in machine.main if "SETMAX" in t}
    return found.get("DEALLOC", machine.registers), found.get("TRY_ALLOC", machine.registers)


@every_variant
def test_one_matrix_instruction_and_one_chain(variant):
    """bf16, k 16, four in a chunk for each width; each adds to the sums that it was given, and the
    last of a stage closes the group.
    """
    found = [text for text in code(variant).main if "MMA" in name(text)]
    matches = [MATRIX.fullmatch(text) for text in found]
    assert all(matches), [t for t, m in zip(found, matches, strict=True) if m is None]
    steps = 4 * variant.chunks
    assert Counter(int(m[1]) for m in matches if m) == dict.fromkeys(variant.widths, steps)
    closed = [m is not None and m[3] is not None for m in matches]
    assert closed == ([False] * (steps - 1) + [True]) * len(variant.widths)


@every_variant
def test_no_spills(variant):
    machine = code(variant)
    assert machine.stack == 0
    assert not [text for text in machine.main if re.match("STL|LDL", text)]


@every_variant
def test_registers_and_shared_memory_of_a_multiprocessor_suffice(variant):
    machine = code(variant)
    at_start = -(-machine.registers // 8) * 8
    assert variant.blocks * at_start * variant.threads <= SM_REGISTERS
    filling, multiplying = registers_taken(machine)
    if (filling, multiplying) != (machine.registers, machine.registers):
        total = 128 * (filling + variant.warpgroups * multiplying)
        assert total <= at_start * variant.threads
    assert machine.shared + variant.shared_bytes <= SM_SHARED


@every_variant
def test_weights_and_tokens_come_by_tensor_copies(variant):
    """down has them twice: before h is there, and in the loop. No load of its own reads either."""
    counts = code(variant).counts
    copies = variant.rows // 8 if variant.op == "gate_up" else 2
    turns = variant.tokens // (variant.piece * variant.cluster)
    shared = 0 if variant.cluster == 1 else variant.chunks * turns
    places = 1 if variant.op == "gate_up" else 2
    assert counts["UTMALDG.3D"] == copies + (places if variant.cluster == 1 else 0)
    assert counts["UTMALDG.3D.MULTICAST"] == places * shared
    assert not [kind for kind in counts if re.match(r"LDG|LDGSTS|UBLKCP", kind)]
    # One lane copies: a loop over lanes would cost more than the copies.
    assert not [kind for kind in counts if kind.startswith("BRA.U.ANY")]


@every_variant
def test_nothing_is_flushed_to_zero_or_approximate(variant):
    machine = code(variant)
    assert {kind for kind in machine.counts if "FTZ" in kind} <= {WHOLE}
    assert {kind for kind in machine.counts if kind.startswith("MUFU")} <= {"MUFU.RCP"}
    assert {kind for kind in machine.counts if kind.startswith("FMNMX")} <= {"FMNMX.NAN"}


@every_variant
def test_only_divisions_and_exp_are_fused_and_only_segments_added(variant):
    """Sums are added outside of the matrix units where a segment ends, and nowhere else."""
    machine = code(variant)
    counts = machine.counts
    divisions, exps = counts["FCHK"], counts["FRND"]
    results = variant.tokens // 4 if variant.op == "gate_up" else 0
    assert divisions == machine.calls == exps == results
    assert counts["MUFU.RCP"] == divisions + counts[WHOLE]
    assert counts["FFMA"] == 5 * divisions + 9 * exps
    segments = variant.tokens // 2 if variant.segmented else 0
    assert counts["FADD"] == exps + segments
    assert counts["FMNMX.NAN"] == 5 * exps
    kinds = {kind for kind in counts if re.match(r"FFMA|FADD|FMUL|HFMA|HADD|HMUL", kind)}
    assert kinds <= {"FFMA", "FADD", "FMUL"}


@every_variant
def test_rows_past_a_block_of_32_lie_in_its_shared_memory(variant):
    """The matrix instruction reads 64 rows, whatever lies behind the real ones."""
    eight = 1024 * (variant.chunks if variant.op == "gate_up" else 1)
    chunk = 1024 * (1 if variant.op == "gate_up" else variant.rows // 8)
    weights = variant.rows * 128 * variant.chunks
    last = (variant.stages - 1) * weights + (variant.chunks - 1) * chunk
    last += (variant.warpgroups - 1) * 8 * eight
    # The ring begins at a multiple of 1024.
    assert 1023 + last + 7 * eight + 1024 <= variant.shared_bytes
