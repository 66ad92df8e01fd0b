"""The CPU's known answers on a processor without wide vector units."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
CHECK = """
import sys
from exactmoe.proof.known_answers import check, known_answers
from numba.core.registry import cpu_target
features = cpu_target.target_context.codegen().magic_tuple()[2]
assert "avx" not in features and "+fma" not in features, features
check.CASES = [case for case in check.CASES if case.name in sys.argv[1:] or not sys.argv[1:]]
report = known_answers("cpu")
report.raise_on_mismatch()
print(sum(count.comparisons for count in report.dimensions.values()))
"""
# A case of each class and of dense parts; router, shared expert, limit, three formats.
SOME = (
    "a16 nvfp4 sigmoid shared limit",
    "a8 mxfp4 sqrt_softplus shared limit",
    "dense fp8, two segments",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "least"),
    [pytest.param(SOME, 20, id="some"), pytest.param((), 100, id="all", marks=pytest.mark.long)],
)
def test_known_answers_without_vector_units(tmp_path, names, least):
    """Numba compiles for a processor with SSE2 only; the stored bytes were made with any."""
    switches = {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
    }
    ran = subprocess.run(
        [sys.executable, "-c", CHECK, *names],
        env={**os.environ, **switches},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > least
