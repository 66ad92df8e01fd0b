"""Proof that the bits are what the contract says, on the machine at hand."""

from exactmoe.proof.compare import Difference
from exactmoe.proof.machine import fingerprint
from exactmoe.proof.replay import Recorded, recording, replay
from exactmoe.proof.report import Bound, Count, Report, table
from exactmoe.proof.vectors import Agreement, Other, Vector, vectors_of
from exactmoe.proof.verify import WIDTHS, verify

__all__ = [
    "WIDTHS",
    "Agreement",
    "Bound",
    "Count",
    "Difference",
    "Other",
    "Recorded",
    "Report",
    "Vector",
    "fingerprint",
    "recording",
    "replay",
    "table",
    "vectors_of",
    "verify",
]
