"""Machine code of the small ops, as their launchers would launch them, for every architecture.

One program compiles them all (a process that has interpreted kernels cannot). Without a card this
shows what a compiler made, not that it runs.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parents[2] / "helpers"
SOURCES = Path(__file__).parents[3] / "src"
NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
ARCHITECTURES = (*NVIDIA, "gfx942")
EVERYWHERE = ["logits narrow", "logits wide", "logits f32", "select", "route_table", "combine a16"]
EVERYWHERE += ["quantize", "finish", "swiglu"]
EARLY = ("sm_90", "sm_100")
WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
# Anything that flushes, approximates, or may be contracted to a fused multiply-add.
LOOSE = re.compile(r"ftz|approx|\.full|ex2|lg2|^(add|sub|mul|mad)\.f(32|64)|^fma")
AMD_FUSED = re.compile(r"v_(pk_)?(fma|mad|mac)\w*_f(16|32|64)")


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(SOURCES), str(HELPERS))),
        "TRITON_CACHE_DIR": str(folder),
    }
    command = [sys.executable, str(HELPERS / "small_op_code.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def matching(facts: dict, pattern: re.Pattern[str] | str) -> dict[str, int]:
    return {name: n for name, n in facts["counts"].items() if re.search(pattern, name)}


def test_every_kernel_compiles_for_every_architecture(code):
    missing = [f"{n}@{a}" for n in EVERYWHERE for a in ARCHITECTURES if f"{n}@{a}" not in code]
    assert not missing


def test_nothing_is_approximate_flushed_or_fused(code):
    for name, facts in code.items():
        if "gfx" not in name and not name.startswith("swiglu"):
            assert not matching(facts, LOOSE), name


def test_the_only_fused_instructions_are_the_written_ones(code):
    for architecture in NVIDIA:
        facts = code[f"swiglu@{architecture}"]
        assert matching(facts, LOOSE) == {"fma.rn.f32": 9}, architecture
        assert matching(facts, r"^div") == {"div.rn.f32": 1}, architecture


def test_amd_keeps_subnormals_and_fuses_only_in_divisions(code):
    for name, facts in code.items():
        if name.endswith("gfx942"):
            modes = matching(facts, "denorm")
            assert set(modes) == {
                ".amdhsa_float_denorm_mode_32 3",
                ".amdhsa_float_denorm_mode_16_64 3",
            }, name
            if not name.startswith(("select", "swiglu")):
                assert not matching(facts, AMD_FUSED), name


@pytest.mark.parametrize(
    ("architecture", "instruction"),
    [
        ("sm_80", r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"),
        ("sm_90", r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"),
        ("sm_100", r"tcgen05\.mma\.cta_group::1\.kind::f16"),
        ("sm_120", r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"),
        ("gfx942", r"v_mfma_f32_16x16x16_bf16"),
    ],
)
def test_narrow_and_wide_logits_use_one_matrix_instruction(code, architecture, instruction):
    for name in ("logits narrow", "logits wide"):
        found = matching(code[f"{name}@{architecture}"], r"mma(_async)?[._]|mfma")
        kinds = {kind for kind in found if not re.search(r"fence|commit|wait", kind)}
        assert kinds and all(re.fullmatch(instruction, kind) for kind in kinds), (name, kinds)
    assert not matching(code[f"logits f32@{architecture}"], r"mma[._]|mfma")


def test_the_tree_of_the_segments_is_not_carried_through_the_matrix_units(code):
    """One sum of each level of the tree stands in the code, even where a chain is one dot."""
    for architecture in ARCHITECTURES:
        assert code[f"logits wide@{architecture}"]["sums"] == 4, architecture
    assert code["logits one step@sm_90"]["sums"] == 4


def test_no_spills(code):
    for name, facts in code.items():
        if name.endswith("sm_90"):
            assert facts["STACK"] == 0 and facts["LOCAL"] == 0, (name, facts)


def test_loads_of_16_bytes(code):
    """All rows of slots and the shared one; activations; and what feeds the matrix units."""
    wide = {"combine a16": 10, "combine a8": 9, "quantize": 1, "quantize f32": 2, "finish": 2}
    for name, loads in wide.items():
        found = matching(code[f"{name}@sm_90"], r"^ld\.global.*\.v4\.b32")
        assert sum(found.values()) == loads, (name, found)
    for name in ("logits narrow", "logits wide"):
        assert matching(code[f"{name}@sm_90"], r"^cp\.async\.cg\.shared\.global$")
        assert not matching(code[f"{name}@sm_90"], r"^cp\.async\.ca|^ld\.global")


def test_early_kernels_wait_before_they_touch_memory_and_only_then_let_the_next_one_start(code):
    for name, facts in code.items():
        kernel, architecture = name.split("@")
        if architecture not in EARLY or kernel == "swiglu":
            continue
        assert facts["waits"], name
        for order in (facts["order"], facts.get("machine order", facts["order"])):
            assert order[:3] == [WAIT, START, "memory"], (name, order)
            assert order.count(WAIT) == order.count(START) == 1, name


def test_only_kernels_that_wait_ask_to_be_started_early(code):
    """Not those that join a second stream, nor those that take tensor memory first."""
    assert {name for name, facts in code.items() if facts["asks"] and not facts["waits"]} == set()
    silent = {name for name, facts in code.items() if facts["waits"] and not facts["asks"]}
    shared = {"combine a16@sm_90", "combine a16@sm_100", "combine a8@sm_90", "combine 64@sm_90"}
    assert silent == shared | {"logits narrow@sm_100", "logits wide@sm_100"}


def test_other_architectures_know_nothing_of_it(code):
    others = [name for name in code if not name.endswith(EARLY)]
    assert len(others) == 3 * len(EVERYWHERE)
    for name in others:
        facts = code[name]
        assert not facts["waits"] and not facts["asks"], name
        assert not {WAIT, START} & set(facts["order"]), name
