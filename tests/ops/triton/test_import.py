"""The package imports without triton; the path that needs it says so."""

import os
import subprocess
import sys
from pathlib import Path

import exactmoe

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import exactmoe
from exactmoe import ops
ops.path("cpu")
try:
    ops.path("triton")
except exactmoe.errors.Unsupported as error:
    print(error.reason)
"""


def test_a_missing_triton_is_named():
    folder = str(Path(exactmoe.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": folder},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the package triton is not installed: this path needs it\n"
