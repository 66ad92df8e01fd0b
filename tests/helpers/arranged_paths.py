"""A path of fragment layout that runs on a CPU, so that a bank's order is tested without a GPU."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bank import arranged
from exactmoe.formats import PackedWeight, fp8_exact
from exactmoe.formats import fragment as layout
from exactmoe.ops.cpu_path import CpuPath

# The package gives the function of this name.
choose_module: Any = importlib.import_module("exactmoe.plan.choose")


class ArrangedPath(CpuPath):
    """The CPU path over bytes in fragment order: `prepare` reads a canonical copy of them."""

    name = "cuda"
    storage = replace(ops.DECODED, layout=ops.FRAGMENT)

    @staticmethod
    def prepare(weight: PackedWeight, fp8: Tensor | None = None):
        canonical = arranged.layout.from_fragment(weight, fp8)
        if fp8 is not None:
            assert torch.equal(fp8, fp8_exact(canonical))
        return CpuPath.prepare(canonical)


class ArrangedA8Path(ArrangedPath):
    """The same where experts that are exact on the fp8 units lie for these."""

    storage = replace(ops.DECODED, layout=ops.FRAGMENT_FP8)


class Involution:
    """A layout of its own: rows backwards, and all bits of the codes turned (of experts of the fp8
    units, the lower half).
    """

    unsupported = staticmethod(layout.unsupported)

    @staticmethod
    def to_fragment(weight: PackedWeight, fp8: Tensor | None = None) -> None:
        codes, scales = _turned(weight, fp8)
        weight.codes.copy_(codes)
        weight.scales.copy_(scales)

    to_canonical = to_fragment

    @staticmethod
    def from_fragment(weight: PackedWeight, fp8: Tensor | None = None) -> PackedWeight:
        codes, scales = _turned(weight, fp8)
        return replace(weight, codes=codes, scales=scales)


def _turned(weight: PackedWeight, fp8: Tensor | None) -> tuple[Tensor, Tensor]:
    bits = torch.full((weight.num_experts, 1, 1), 0xFF, dtype=torch.uint8)
    if fp8 is not None:
        bits[fp8] = 0x0F
    return weight.codes.flip(1) ^ bits, weight.scales.flip(1)


LAYOUTS = {"fragment": layout, "involution": Involution}


@contextmanager
def arranged_backend(monkeypatch: pytest.MonkeyPatch, which: str) -> Iterator[None]:
    """Backend "cuda" is an `ArrangedPath` on the CPU, or in class a8 an `ArrangedA8Path`, and
    "triton" the CPU path.
    """
    paths = {"cuda": ArrangedPath(), "cuda_a8": ArrangedA8Path(), "triton": CpuPath()}
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
