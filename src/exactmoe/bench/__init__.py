"""Benchmarks: bits first, then time against what the machine can do and against others."""

from exactmoe.bench.cliff import Step, cliff_widths, steps
from exactmoe.bench.plot import write_plot
from exactmoe.bench.record import Record, write_csv
from exactmoe.bench.run import PARTS, Bench, Settings
from exactmoe.bench.shapes import SHAPES, Shape, parse_shape
from exactmoe.bench.tables import notes, tables
from exactmoe.bench.timing import timer_of

__all__ = [
    "PARTS",
    "SHAPES",
    "Bench",
    "Record",
    "Settings",
    "Shape",
    "Step",
    "cliff_widths",
    "notes",
    "parse_shape",
    "steps",
    "tables",
    "timer_of",
    "write_csv",
    "write_plot",
]
