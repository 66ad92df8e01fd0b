"""Every environment switch in one table: name, type, default, meaning.

No other module reads the environment. A switch is read when it is used, not at import, and a value
that cannot be parsed raises ConfigError.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exactmoe.errors import ConfigError


@dataclass(frozen=True)
class Switch:
    """One environment variable: how to parse it, its default, and what it does."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    allowed: str
    meaning: str


@dataclass(frozen=True)
class Secret:
    """A value that no table, log or error message shows."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return "set, not shown"


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _on_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(text)
    return text == "on"


def _truth(text: str) -> bool:
    # As Triton reads it.
    return text.lower() in ("1", "true", "on", "yes", "y")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(text)
        return text

    return parse


SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        Switch(
            name="EXACTMOE_BACKEND",
            parse=_choice("auto", "cuda", "triton", "cpu", "reference"),
            default="auto",
            allowed="auto, cuda, triton, cpu, reference",
            meaning="Backend of layers made with backend='auto'. It changes speed, never a bit.",
        ),
        Switch(
            name="EXACTMOE_THREADS",
            parse=_positive_int,
            default=None,
            allowed="a positive integer",
            meaning="Threads of the CPU backend; by default as many as torch uses.",
        ),
        Switch(
            name="EXACTMOE_TILE",
            parse=_positive_int,
            default=None,
            allowed="a positive integer",
            meaning="Forces the tokens of a tile on a GPU; by default a table chooses. "
            "It changes speed, never a bit.",
        ),
        Switch(
            name="EXACTMOE_SHARED_STREAM",
            parse=_on_off,
            default=True,
            allowed="on, off",
            meaning="Runs the shared expert of a layer on a second stream of the GPU.",
        ),
        Switch(
            name="EXACTMOE_UNION",
            parse=_on_off,
            default=True,
            allowed="on, off",
            meaning="off, for comparison: a call runs token by token, so that an expert that "
            "several tokens share is read for each of them.",
        ),
        Switch(
            name="EXACTMOE_HOST_LOOP",
            parse=_on_off,
            default=False,
            allowed="on, off",
            meaning="on, for comparison: the host reads the route table and launches each expert "
            "by itself; refused while a CUDA graph is captured.",
        ),
        Switch(
            name="EXACTMOE_GATE_UP",
            parse=_choice("one", "two"),
            default="one",
            allowed="one, two",
            meaning="two, for comparison: gate and up of routed experts in two launches on the "
            "portable GPU path, instead of one.",
        ),
        Switch(
            name="EXACTMOE_EXPERTS",
            parse=_choice("auto", "one", "two"),
            default="auto",
            allowed="auto, one, two",
            meaning="for comparison: gate_up and down of routed experts in one launch or in two on "
            "the sm_90 path; auto takes what is faster at the call's width.",
        ),
        Switch(
            name="EXACTMOE_EARLY",
            parse=_on_off,
            default=True,
            allowed="on, off",
            meaning="off, for comparison: no kernel starts while the one before it ends (sm_90, "
            "sm_100).",
        ),
        Switch(
            name="EXACTMOE_CACHE",
            parse=Path,
            default=None,
            allowed="a folder",
            meaning="Where compiled CUDA kernels are kept; by default ~/.cache/exactmoe.",
        ),
        Switch(
            name="EXACTMOE_API_KEY",
            parse=Secret,
            default=None,
            allowed="a text",
            meaning="Key that requests to `exactmoe serve` must bear; by default none is asked "
            "for.",
        ),
        Switch(
            name="TRITON_INTERPRET",
            parse=_truth,
            default=False,
            allowed="Triton's own switch: 1 or 0",
            meaning="Lets Triton interpret its kernels, so that backend 'triton' runs on a CPU.",
        ),
    )
}


def read(name: str) -> Any:
    """The value of switch `name`, parsed, or its default when it is unset or empty.

    Raises:
        ConfigError: the text is not one of the allowed values.
        KeyError: no such switch.
    """
    switch = SWITCHES[name]
    text = os.environ.get(name, "")
    if text == "":
        return switch.default
    try:
        return switch.parse(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}; allowed: {switch.allowed}") from None


@contextmanager
def forced(name: str, text: str) -> Iterator[None]:
    """While it lasts, switch `name` is set to `text`, in the whole process (proofs use it).

    Raises:
        ConfigError: the text is not one of the allowed values.
    """
    before = os.environ.get(name)
    os.environ[name] = text
    try:
        read(name)
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def changed() -> dict[str, Any]:
    """The switches that are set to something other than their default: name -> value."""
    values = {name: read(name) for name in SWITCHES}
    return {n: v for n, v in values.items() if v != SWITCHES[n].default}


def plain(value: Any) -> str | int | None:
    """A value as it is written in the environment; None: unset."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if value is None or isinstance(value, int) else str(value)
