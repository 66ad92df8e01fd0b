"""From one checkpoint to another: quantised, cast, or in another dialect."""

from exactmoe.checkpoint.rewrite.convert import convert_checkpoint
from exactmoe.checkpoint.rewrite.engine import REPORT, WORK, Row
from exactmoe.checkpoint.rewrite.quantize import QuantizeRequest, quantize_checkpoint

__all__ = [
    "REPORT",
    "WORK",
    "QuantizeRequest",
    "Row",
    "convert_checkpoint",
    "quantize_checkpoint",
]
