"""A path whose ops are recorded as spans; everything else of it is as it was."""

from collections.abc import Callable
from typing import Any, cast

from exactmoe.ops.path import Path
from exactmoe.runtime.spans import CallSpans

# Op of a path -> name of its span.
_SPANS = {
    "router": "router",
    "route_table": "sort",
    "gate_up": "gate_up",
    "gate_up_quantized": "gate_up",
    "quantize": "quantize",
    "down": "down",
    "combine": "combine",
    "dense_mlp": "shared",
    "dense_gate_up": "shared",
    "finish": "finish",
}


class _Timed:
    def __init__(self, path: Path, call: CallSpans, card: int) -> None:
        self._path, self._call, self._card = path, call, card

    def __getattr__(self, name: str) -> Any:
        found, span = getattr(self._path, name), _SPANS.get(name)
        if span is None:
            return found
        if span == "shared" and self._call.dense:
            span = "dense"
        return self._recorded(found, span)

    def _recorded(self, op: Callable[..., Any], span: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with self._call.span(span, self._card):
                return op(*arguments, **named)

        return run


def timed(path: Path, call: CallSpans, card: int = 0) -> Path:
    """The path, each op of which is a span of `call`. Results are the path's own."""
    inner = path._path if isinstance(path, _Timed) else path
    return cast(Path, _Timed(inner, call, card))
