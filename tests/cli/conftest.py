"""The demo checkpoints, and the command line in this process."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from typer.testing import CliRunner

from exactmoe.cli.app import build

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODELS = ("glm5_next", "deepseek_v4")


@pytest.fixture(params=MODELS)
def demo(request):
    return str(DEMO / request.param)


@pytest.fixture
def glm():
    return str(DEMO / "glm5_next")


@pytest.fixture
def run():
    """Runs a command line in this process: result with exit_code, stdout, stderr."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(build(), [str(a) for a in arguments])
