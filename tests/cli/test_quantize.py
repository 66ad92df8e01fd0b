"""`exactmoe quantize` and `exactmoe convert`, and models that load what they wrote."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exactmoe.hf import load_model
from synthetic_checkpoints import Synthetic, write_synthetic

SRC = Path(__file__).resolve().parents[2] / "src"


def logits(path):
    model = load_model(str(path), progress=False)
    ids = torch.arange(1, 24)[None]
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_a_cast_model_is_the_same_model(run, tmp_path):
    """DeepSeek-V4's MXFP4 as NVFP4: an exact cast, and the same logits byte by byte."""
    demo = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    result = run("quantize", demo, tmp_path / "out", "--format", "nvfp4", "--json")
    assert result.exit_code == 0, result.stderr
    (kind,) = json.loads(result.stdout)["kinds"]
    assert (kind["weights"], kind["exact"], kind["sqnr_db_least"]) == (360, 360, None)
    before, after = logits(demo), logits(tmp_path / "out")
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_all_of_a_model(run, tmp_path, glm):
    """Dense and shared MLPs too, with a picture; then in the other dialect."""
    out, picture = tmp_path / "out", tmp_path / "errors.png"
    command = ("quantize", glm, out, "--format", "nvfp4", "--what", "all", "--plot", picture)
    refused = run(*command)
    assert refused.exit_code == 2
    assert "allowed without --lossy: exact casts" in refused.stderr
    result = run(*command, "--lossy")
    assert result.exit_code == 0, result.stderr
    assert "shared expert" in result.stdout and "SQNR dB" in result.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert torch.isfinite(logits(out)).all()
    result = run("convert", out, tmp_path / "ct", "--dialect", "compressed-tensors", "--lossy")
    assert result.exit_code == 0, result.stderr
    assert "compressed-tensors NVFP4" in result.stdout
    assert torch.isfinite(logits(tmp_path / "ct")).all()


@pytest.mark.parametrize(
    "arguments", [("--format", "int4"), ("--format", "nvfp4", "--rule", "ocp")]
)
def test_bad_values(run, tmp_path, glm, arguments):
    result = run("quantize", glm, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert "allowed:" in result.stderr
    assert not (tmp_path / "out").exists()


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# The third shard is begun: one write of it is done.
KILLED = """
import os, signal
from exactmoe.checkpoint.rewrite.files import ShardWriter
from exactmoe.cli import main
write = ShardWriter.write
def killed(self, *arguments):
    write(self, *arguments)
    if len(list(self._path.parent.glob("*.safetensors"))) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
ShardWriter.write = killed
main()
"""


def test_a_killed_run_continues(run, tmp_path):
    """SIGKILL in a shard; the command again gives the bytes of a whole run."""
    size = Synthetic("deepseek_v4", "bf16", 256, 256, 4, 4, shards=6)
    source = write_synthetic(tmp_path / "in", size)
    command = ["quantize", str(source), str(tmp_path / "out"), "--format", "nvfp4", "--lossy"]
    command += ["--rule", "four_over_six", "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", KILLED, *command]
    process = subprocess.run(program, env=environment, stderr=subprocess.DEVNULL, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert len(list((tmp_path / "out").glob("*.partial"))) == 1
    assert not (tmp_path / "out" / "config.json").exists()
    assert run(*command).exit_code == 0
    command[2] = str(tmp_path / "whole")
    assert run(*command).exit_code == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
