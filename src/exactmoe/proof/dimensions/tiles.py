"""Tiles: every width of the token tile that the layer's path offers, forced."""

from exactmoe import env
from exactmoe.plan.tiles import offered
from exactmoe.proof.backends import gpu_order
from exactmoe.proof.trial import Trial

_STREAM = 160
_WIDTHS = (1, 9, 65, 300)


def tiles(trial: Trial) -> None:
    """A tile never changes a bit: each against the one that the table chooses."""
    layer = trial.entry.layer
    if not gpu_order(layer):
        trial.cannot_run("tiles", "the tile of the CPU's backends is fixed")
        return
    for tokens in sorted({*_WIDTHS, min(1000, max(trial.widths))}):
        batch = trial.random(tokens, _STREAM)
        expected = trial.run(batch)
        for width in offered(layer.plan().tiles):
            with env.forced("EXACTMOE_TILE", str(width)):
                trial.compare("tiles", f"tile of {width} tokens", expected, trial.run(batch))
