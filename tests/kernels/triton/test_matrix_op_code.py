"""Machine code of the matrix ops for every architecture: one matrix instruction whatever the tile,
k ascending in it, chains that end where the contract says.

One program compiles them all (a process that has interpreted kernels cannot). Without a card this
shows what a compiler made, not that it runs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exactmoe.plan.architectures import ARCHITECTURES

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parents[2] / "helpers"
SOURCES = Path(__file__).parents[3] / "src"
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
INSTRUCTIONS = {
    "sm_90": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    "sm_100": r"tcgen05\.mma\.cta_group::1\.kind::f16",
    "gfx942": r"v_mfma_f32_16x16x16_bf16",
    "gfx950": r"v_mfma_f32_16x16x32_bf16",
}
# Columns in a row of a lane that put 16 (gfx950: 32) columns in a row into one instruction.
COLUMNS = {"gfx942": [4], "gfx950": [8]}
# Anything that flushes, approximates, or may be contracted to a fused multiply-add.
LOOSE = re.compile(r"ftz|approx|\.full|ex2|lg2|^(add|sub|mul|mad)\.f(32|64)")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("ends", id="narrow and wide tiles"),
        pytest.param("", id="every tile", marks=pytest.mark.long),
    ],
)
def code(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(SOURCES), str(HELPERS))),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    command = [sys.executable, str(HELPERS / "matrix_op_code.py"), *request.param.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of(code: dict[str, dict[str, Any]], pattern: str) -> dict[str, dict[str, Any]]:
    found = {name: facts for name, facts in code.items() if re.search(pattern, name)}
    assert found, pattern
    return found


def accumulators(name: str) -> int:
    """Float32 sums of a lane in a tile of 64 rows and at most 64 tokens."""
    tokens = min(int(name.partition("@")[0].split()[-1]), 64)
    return 64 * tokens // (256 if tokens == 64 else 128)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tile_uses_one_matrix_instruction(code, architecture):
    for name, facts in of(code, f"@{architecture}$").items():
        kinds = {kind for kind in facts["counts"] if re.search(r"mma(_async)?[._]|mfma", kind)}
        kinds = {kind for kind in kinds if not re.search(r"fence|commit|wait", kind)}
        instruction = INSTRUCTIONS.get(architecture, MMA)
        assert kinds and all(re.fullmatch(instruction, kind) for kind in kinds), (name, kinds)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_instruction_multiplies_columns_in_a_row(code, architecture):
    for name, facts in of(code, f"@{architecture}$").items():
        assert facts["columns"] in ([], COLUMNS.get(architecture, [2])), (name, facts["columns"])


def test_amd_is_asked_for_one_instruction(code):
    """Left to itself it takes 32 x 32 for wide tiles."""
    for facts in of(code, "@gfx").values():
        assert facts["options"]["matrix_instr_nonkdim"] == 16


def test_chains_of_128_are_not_carried_through_the_matrix_units(code):
    """Each step begins anew and ends in one fused multiply-add a sum."""
    for name, facts in of(code, r"(mxfp4 a8|fp8 a16) .*@sm_(80|90|120)$").items():
        machine, sums = facts["machine"], accumulators(name)
        assert machine["FFMA"] == sums, name
        if "HGMMA" in machine:
            assert (machine["HGMMA"], facts["starts"]) == (8, 1), name
        else:
            assert machine["HMMA"] == 8 * facts["starts"] and 4 * facts["starts"] == sums, name


def test_a_segment_of_one_step_begins_anew(code):
    for name, facts in of(code, "dense_segments").items():
        machine, sums = facts["machine"], accumulators(name)
        assert machine["FADD"] == 2 * sums, name  # +0 + first, + second
        assert facts["starts"] == (1 if "HGMMA" in machine else sums // 4), name


def test_one_chain_has_no_other_beginning(code):
    for name, facts in of(code, r"^down (nvfp4 a16 .*@sm_(80|90|120)|bf16 a16 .*@sm_90)$").items():
        assert facts["starts"] == 0 and "FADD" not in facts["machine"], name


def test_nothing_is_approximate_flushed_or_fused(code):
    for name, facts in code.items():
        if "@sm_" in name:
            assert not [kind for kind in facts["counts"] if LOOSE.search(kind)], name
        else:
            modes = [kind for kind in facts["counts"] if "denorm" in kind]
            assert len(modes) == 2 and all(mode.endswith(" 3") for mode in modes), name


def test_no_spills(code):
    for name, facts in of(code, "@sm_90$").items():
        assert facts["stack"] == 0, name


def test_dense_loads_of_16_bytes(code):
    for name, facts in of(code, r"bf16 a16 .*@sm_90$").items():
        copies = {kind for kind in facts["counts"] if kind.startswith("cp.async.c")}
        copies -= {"cp.async.commit_group"}
        assert copies == {"cp.async.cg.shared.global"}, (name, copies)
