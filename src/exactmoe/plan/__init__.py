"""Which path runs, with which tile, and why: pure data, no device work."""

from exactmoe.plan.architectures import (
    ARCHITECTURES,
    architecture_name,
    architecture_of,
    require_one_architecture,
)
from exactmoe.plan.choose import BACKENDS, Plan, Rejected, WeightShape, backends, choose
from exactmoe.plan.explain import (
    Explanation,
    dense_tiles_of,
    explain,
    first_line,
    mlp_tiles_of,
    tiles_of,
)
from exactmoe.plan.tiles import Tile, TileChoice, tile

__all__ = [
    "ARCHITECTURES",
    "BACKENDS",
    "Explanation",
    "Plan",
    "Rejected",
    "Tile",
    "TileChoice",
    "WeightShape",
    "architecture_name",
    "architecture_of",
    "backends",
    "choose",
    "dense_tiles_of",
    "explain",
    "first_line",
    "mlp_tiles_of",
    "require_one_architecture",
    "tile",
    "tiles_of",
]
