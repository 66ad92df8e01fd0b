"""The CPU's known answers on a processor without wide vector units."""

import os
import subprocess
import sys

import pytest

CHECK = """
import numba
from exactmoe.proof.known_answers import known_answers
from numba.core.registry import cpu_target
features = cpu_target.target_context.codegen().magic_tuple()[2]
assert "avx" not in features and "+fma" not in features, features
report = known_answers("cpu")
report.raise_on_mismatch()
print(sum(count.comparisons for count in report.dimensions.values()))
"""


@pytest.mark.slow
def test_known_answers_without_vector_units(tmp_path):
    """Numba compiles for a processor with SSE2 only; the stored bytes were made with any."""
    switches = {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, **switches},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 100
