"""A path of fragment layout that runs on a CPU, so that a bank's order is tested without a GPU."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from exactmoe import ops
from exactmoe.bank import arranged
from exactmoe.formats import PackedWeight
from exactmoe.formats import fragment as layout
from exactmoe.ops.cpu_path import CpuPath

# The package gives the function of this name.
choose_module: Any = importlib.import_module("exactmoe.plan.choose")


class ArrangedPath(CpuPath):
    """The CPU path over bytes in fragment order: `prepare` reads a canonical copy of them."""

    name = "cuda"
    storage = replace(ops.DECODED, layout=ops.FRAGMENT)

    @staticmethod
    def prepare(weight: PackedWeight):
        return CpuPath.prepare(arranged.layout.from_fragment(weight))


class Involution:
    """A layout of its own: rows backwards, and all bits of the codes turned."""

    unsupported = staticmethod(layout.unsupported)

    @staticmethod
    def to_fragment(weight: PackedWeight) -> None:
        weight.codes.copy_(weight.codes.flip(1) ^ 0xFF)
        weight.scales.copy_(weight.scales.flip(1))

    to_canonical = to_fragment

    @staticmethod
    def from_fragment(weight: PackedWeight) -> PackedWeight:
        return replace(weight, codes=weight.codes.flip(1) ^ 0xFF, scales=weight.scales.flip(1))


LAYOUTS = {"fragment": layout, "involution": Involution}


@contextmanager
def arranged_backend(monkeypatch: pytest.MonkeyPatch, which: str) -> Iterator[None]:
    """Backend "cuda" is an `ArrangedPath` on the CPU, and "triton" the CPU path."""
    paths = {"cuda": ArrangedPath(), "triton": CpuPath()}
    found, obstacle = ops.path, choose_module._obstacle
    monkeypatch.setattr(ops, "path", lambda name: paths.get(name) or found(name))

    def able(name, call, interpreted):
        if name == "cuda":
            # This path reads views too.
            experts = tuple(weight._replace(contiguous=True) for weight in call.experts)
            return choose_module._unfit(replace(call, experts=experts))
        return None if name == "triton" else obstacle(name, call, interpreted)

    monkeypatch.setattr(choose_module, "_obstacle", able)
    monkeypatch.setattr(arranged, "layout", LAYOUTS[which])
    choose_module._chosen.cache_clear()
    try:
        yield
    finally:
        monkeypatch.undo()
        choose_module._chosen.cache_clear()
