"""What all pictures share: a figure of the pages' width, and its PNG."""

import io
from typing import Any

from exactmoe.errors import Unsupported

_DPI = 130
_WIDTH = 11.0


def figure_of(height: float) -> Any:
    """A matplotlib figure, as wide as a page, this many inches high.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(
            "pictures need matplotlib, which is not installed: pip install 'exactmoe[plot]'"
        ) from None
    return Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")


def png(figure: Any) -> bytes:
    """The bytes of its file, the same for the same picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
