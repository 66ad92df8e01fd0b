"""Spans in the Trace Event Format, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exactmoe.errors import ConfigError
from exactmoe.runtime.spans import Span

# Process numbers of the trace: the host, then a card each.
_HOST, _FIRST_CARD = 0, 1


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Complete events ("X", microseconds) and the names of their tracks: a process for each card
    with a thread for each stream, and one for the host, where it only queues work.
    """
    lanes = {key: number for number, key in enumerate(dict.fromkeys(map(_lane, spans)))}
    made = [_name("process_name", card + _FIRST_CARD, 0, f"card {card}") for card in _cards(spans)]
    for (card, lane), number in lanes.items():
        told = f"stream {lane}" if lane else "host computes"
        made.append(_name("thread_name", card + _FIRST_CARD, number, told))
    queued = any(span.lane for span in spans)
    if queued:
        made.append(_name("process_name", _HOST, 0, "host queues"))
        made.append(_name("thread_name", _HOST, 0, "calls"))
    for span in sorted(spans, key=lambda span: (span.start, -span.seconds)):
        where = (span.card + _FIRST_CARD, lanes[_lane(span)])
        made.append(_event(span, *where, span.start, span.seconds))
        if queued:
            made.append(_event(span, _HOST, 0, span.queued, span.queueing))
    return made


def write_trace(path: str | Path, spans: Sequence[Span]) -> None:
    """Write the file.

    Raises:
        ConfigError: it cannot be written.
    """
    content = {"displayTimeUnit": "ns", "traceEvents": events(spans)}
    try:
        Path(path).write_text(json.dumps(content, allow_nan=False) + "\n", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _lane(span: Span) -> tuple[int, str]:
    return span.card, span.lane


def _cards(spans: Sequence[Span]) -> list[int]:
    return sorted({span.card for span in spans})


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Span, process: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    name = f"layer {span.layer}" if span.name == "call" else span.name
    return {
        "name": name,
        "cat": span.name,
        "ph": "X",
        "ts": round(1e6 * start, 3),
        "dur": round(1e6 * seconds, 3),
        "pid": process,
        "tid": thread,
        "args": {"layer": span.layer, "tokens": span.width, "call": span.call},
    }
