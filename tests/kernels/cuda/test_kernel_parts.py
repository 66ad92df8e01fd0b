"""benchmarks/kernel_parts.py finds each part in the kernels' text, and what it leaves compiles."""

import importlib.util
import sys
from pathlib import Path

import pytest

from cuda_code import a8_variants, variant_name, variants
from exactmoe.errors import Unsupported
from exactmoe.kernels.cuda import compile as compiler
from exactmoe.kernels.cuda.source import Variant

_PATH = Path(__file__).resolve().parents[3] / "benchmarks/kernel_parts.py"
_SPEC = importlib.util.spec_from_file_location("kernel_parts", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
kernel_parts = importlib.util.module_from_spec(_SPEC)
sys.modules["kernel_parts"] = kernel_parts
_SPEC.loader.exec_module(kernel_parts)
MEASURED = [v for v in (*variants(), *a8_variants()) if v.activation == "a16" or v.units == "fp8"]
OTHERS = [v for v in a8_variants() if v.units != "fp8"]
# Both classes, and both forms of the loop in a8.
COMPILED = (
    Variant("nvfp4", 8, gather=True),
    Variant("mxfp4", 8, True, True, "a8", "fp8"),
    Variant("mxfp4", 112, False, True, "a8", "fp8"),
)


@pytest.mark.parametrize("part", ["", *kernel_parts.PARTS])
@pytest.mark.parametrize("variant", MEASURED, ids=variant_name)
def test_a_part_is_found(variant, part):
    text = kernel_parts.Without(variant, part).text()
    assert (text == kernel_parts.Without(variant).text()) == (not part)


@pytest.mark.parametrize("variant", OTHERS, ids=variant_name)
def test_other_units_are_refused(variant):
    with pytest.raises(Unsupported, match="allowed in class a8: 'fp8'"):
        kernel_parts.Without(variant, "no epilogue").text()


def test_changed_text_is_refused(monkeypatch):
    monkeypatch.setattr(Variant, "text", lambda self: "void experts() {}")
    with pytest.raises(Unsupported, match="0 times; allowed: once"):
        kernel_parts.Without(COMPILED[0], "no epilogue").text()


@pytest.mark.skipif(compiler.missing() is not None, reason=f"no NVRTC: {compiler.missing()}")
@pytest.mark.parametrize("variant", COMPILED, ids=variant_name)
def test_each_part_makes_another_machine_code(variant):
    parts = ("", *kernel_parts.PARTS)
    codes = [compiler._compiled(kernel_parts.Without(variant, part).text()) for part in parts]
    assert len(set(codes)) == len(parts)
