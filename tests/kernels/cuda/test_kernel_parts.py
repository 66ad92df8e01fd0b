"""benchmarks/kernel_parts.py finds each part in the kernels' text, and what it leaves compiles."""

import importlib.util
import sys
from pathlib import Path

import pytest

from cuda_code import a8_variants, variant_name, variants
from exactmoe.kernels.cuda import compile as compiler
from exactmoe.kernels.cuda.source import Variant

_PATH = Path(__file__).resolve().parents[3] / "benchmarks/kernel_parts.py"
_SPEC = importlib.util.spec_from_file_location("kernel_parts", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
kernel_parts = importlib.util.module_from_spec(_SPEC)
sys.modules["kernel_parts"] = kernel_parts
_SPEC.loader.exec_module(kernel_parts)
ALL = [v for v in (*variants(), *a8_variants()) if v.activation == "a16" or v.units == "fp8"]
COMPILED = (Variant("nvfp4", 8, gather=True), Variant("mxfp4", 112, False, True, "a8", "fp8"))


@pytest.mark.parametrize("part", ["", *kernel_parts.PARTS])
@pytest.mark.parametrize("variant", ALL, ids=variant_name)
def test_a_part_is_found(variant, part):
    text = kernel_parts.Without(variant, part).text()
    assert text != kernel_parts.Without(variant).text() or not part


@pytest.mark.skipif(compiler.missing() is not None, reason=f"no NVRTC: {compiler.missing()}")
@pytest.mark.parametrize("part", ["", *kernel_parts.PARTS])
@pytest.mark.parametrize("variant", COMPILED, ids=variant_name)
def test_the_rest_compiles(variant, part, tmp_path, monkeypatch):
    monkeypatch.setenv("EXACTMOE_CACHE", str(tmp_path))
    assert compiler._compiled(kernel_parts.Without(variant, part).text())
