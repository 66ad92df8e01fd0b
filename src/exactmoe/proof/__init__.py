"""Proof that the bits are what the contract says, on the machine at hand."""

from exactmoe.proof.compare import Difference
from exactmoe.proof.report import Count, Report, table
from exactmoe.proof.verify import WIDTHS, verify

__all__ = ["WIDTHS", "Count", "Difference", "Report", "table", "verify"]
