"""From a folder to a service that has written its first token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exactmoe.hf import blocks, load_model
from exactmoe.hf.text import load_tokenizer
from exactmoe.layer import MoELayer
from exactmoe.serve.engine import Engine
from exactmoe.serve.limits import ServeLimits
from exactmoe.serve.metrics import Metrics
from exactmoe.serve.served import Served, fingerprint
from exactmoe.serve.service import Service


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How a model is to be served.

    Attributes:
        name: that requests give.
        limits: of requests.
        chunk: tokens of a prompt a forward call; None: all in one.
        key: that requests must bear; None: none.
        machine: plain facts of programs and machine; they go into the fingerprint.
    """

    name: str
    limits: ServeLimits
    chunk: int | None
    key: str | None
    machine: dict[str, Any]


def load_service(folder: Path, settings: dict[str, Any], wanted: Wanted) -> Service:
    """Load a model and let it write one token; settings are arguments of load_model."""
    tokenizer = load_tokenizer(folder)
    model = load_model(str(folder), **settings, progress=False)
    layers = [layer for _, _, layer in blocks(model)]
    classes = {lay.numerics.activation for lay in layers if isinstance(lay, MoELayer)}
    facts = {
        "cards": ",".join(settings["cards"]),
        "numerics": ",".join(sorted(classes)),
        "backend": ",".join(sorted({layer.plan().backend for layer in layers})),
        "exactmoe": str(wanted.machine["exactmoe"]),
    }
    made_of = {**wanted.machine, **facts, "chunk": wanted.chunk}
    served = Served(
        name=wanted.name,
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint(made_of, folder),
        facts=facts,
    )
    metrics = Metrics({"model": served.name, "fingerprint": served.fingerprint, **facts})
    # A tokenizer of its own: prompts are read by other threads meanwhile.
    engine = Engine(model, load_tokenizer(folder), wanted.limits.queue, metrics, wanted.chunk)
    engine.try_out()
    return Service(
        served=served, engine=engine, limits=wanted.limits, metrics=metrics, key=wanted.key
    )
