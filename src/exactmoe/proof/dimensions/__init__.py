"""What may not change a bit: one file a dimension, each a function of a Trial.

A new dimension is a new file and a line in DIMENSIONS. The order is from the plain to the special:
a fault is named by the first dimension that meets it. Where a dimension cannot run it says so in
the report (Trial.cannot_run).
"""

from collections.abc import Callable

from exactmoe.proof.dimensions.backend import backend
from exactmoe.proof.dimensions.callers import callers
from exactmoe.proof.dimensions.captured import captured
from exactmoe.proof.dimensions.cards import cards
from exactmoe.proof.dimensions.chunks import chunks
from exactmoe.proof.dimensions.levers import levers
from exactmoe.proof.dimensions.memory import memory
from exactmoe.proof.dimensions.neighbours import neighbours
from exactmoe.proof.dimensions.order import order
from exactmoe.proof.dimensions.pieces import pieces
from exactmoe.proof.dimensions.position import position
from exactmoe.proof.dimensions.ranks import not_over_ranks, ranks
from exactmoe.proof.dimensions.repeats import repeats
from exactmoe.proof.dimensions.stages import stages
from exactmoe.proof.dimensions.streams import streams
from exactmoe.proof.dimensions.strides import strides
from exactmoe.proof.dimensions.threads import threads
from exactmoe.proof.dimensions.tiles import tiles
from exactmoe.proof.dimensions.width import width
from exactmoe.proof.trial import Trial

DIMENSIONS: dict[str, Callable[[Trial], None]] = {
    function.__name__: function
    for function in (
        repeats,
        width,
        position,
        neighbours,
        chunks,
        order,
        pieces,
        memory,
        strides,
        threads,
        callers,
        streams,
        captured,
        tiles,
        levers,
        backend,
        cards,
        ranks,
        stages,
    )
}

__all__ = ["DIMENSIONS", "not_over_ranks"]
