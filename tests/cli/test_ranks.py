"""Commands under torchrun: one voice, and the statuses of all ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exactmoe.proof.known_answers import known_answers

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"


def torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """exactmoe ... in `size` processes, on a port that torchrun chooses."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), "-m", "exactmoe.cli", *arguments]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def compiled():
    """The CPU's kernels go to numba's cache here, so that not every process compiles them."""
    known_answers("cpu").raise_on_mismatch()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_verify_over_two_ranks():
    asked = ("--layers", "1", "--widths", "1,2", "--prompt", "def f(x):", "--json")
    done = torchrun(2, "verify", str(DEMO / "deepseek_v4"), *asked)
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["ok"] and proof["other_ranks"] == []
    layer = next(r for r in proof["reports"] if r["subject"].startswith("layer 1"))
    assert layer["dimensions"]["ranks"]["comparisons"] >= 864
    assert set(layer["not_run"]) >= {"cards", "callers"}


@pytest.mark.long
@pytest.mark.slow
def test_generate_over_three_ranks_is_the_text_of_one_process():
    asked = ("generate", str(DEMO / "glm5_next"), "--prompt", "def f(x):", "--json")
    asked += ("--max-new-tokens", "6")
    over_ranks, alone = torchrun(3, *asked), torchrun(1, *asked)
    found, wanted = json.loads(over_ranks.stdout), json.loads(alone.stdout)
    assert found["text"] == wanted["text"] and found["new_tokens"] == 6
    assert found["expert_bytes_in_memory"] < 0.4 * wanted["expert_bytes_in_memory"]
    assert "3 ranks, even over 3" in found["explain"]["1"]["cards"][0]


@pytest.mark.slow
def test_a_command_that_knows_no_ranks():
    done = torchrun(1, "routes", str(DEMO / "glm5_next"), "--text", str(Path(__file__)))
    assert done.returncode != 0
    assert "torchrun started this process; allowed over ranks: generate, verify" in done.stderr
