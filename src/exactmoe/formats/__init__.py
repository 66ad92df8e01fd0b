"""What the bytes of a packed weight mean: codes, block scales, global scales, quantisers."""

from exactmoe.formats.packed import (
    BLOCK,
    FP4_FORMATS,
    PackedWeight,
    apply_global_scale,
    dequantize,
    exponent_range,
    operand,
)
from exactmoe.formats.quantize import quantize, quantize_mxfp4, quantize_nvfp4
from exactmoe.formats.units import fp8_exact

__all__ = [
    "BLOCK",
    "FP4_FORMATS",
    "PackedWeight",
    "apply_global_scale",
    "dequantize",
    "exponent_range",
    "fp8_exact",
    "operand",
    "quantize",
    "quantize_mxfp4",
    "quantize_nvfp4",
]
