"""Launches of the routed experts' kernels on sm_90 that are kept and not run: the kernel is a fake,
and tensors are on the CPU.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from exactmoe.formats.rows import Rows
from exactmoe.kernels.cuda.source import Pack, Variant
from exactmoe.ops.cuda import experts
from exactmoe.ops.cuda.arguments import Arguments
from exactmoe.ops.cuda.counters import NUM_COUNTERS
from exactmoe.ops.cuda.prepare import CudaWeight
from exactmoe.runtime.routes import RouteTable

STREAM, MANY = 77, 10**9
BLOCK = {"nvfp4": 16, "mxfp4": 32}
COUNTERS = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
_C_TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "float": ctypes.c_float}


@dataclass(frozen=True)
class Launched:
    """One launch; arguments by the names of the kernel's C parameters, or of the parts of its
    structure ("gate.codes").
    """

    what: Variant | Pack
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    early: bool


def parameters(what: Pack) -> dict[str, type]:
    """Names and ctypes of the packing kernel's parameters, from its source."""
    (found,) = re.findall(rf"^{what.entry}\((.*?)\) \{{", what.text(), re.M | re.S)
    names = {}
    for parameter in found.split(","):
        kind, name = parameter.strip().rsplit(" ", 1)
        names[name] = _c_type(kind)
    return names


def members(structure: str) -> dict[str, type]:
    """Names and ctypes of all that a structure of experts.cuh holds, in order."""
    text = (files("exactmoe.kernels.cuda") / "experts.cuh").read_text(encoding="utf-8")
    _, _, body = text.partition(f"struct {structure} {{\n")
    found: dict[str, type] = {}
    for line in re.split(r"^(?:\};)?$", body, maxsplit=1, flags=re.M)[0].splitlines():
        kind, names = re.findall(r"^ +((?:const )?\w+\*?) ([\w, ]+);", line)[0]
        for name in names.split(", "):
            if kind in ("Projection", "Rows"):
                found |= {f"{name}.{part}": what for part, what in members(kind).items()}
            else:
                found[name] = _c_type(kind)
    return found


def _c_type(kind: str) -> type:
    return ctypes.c_void_p if kind.endswith("*") else _C_TYPES[kind]


def flat(given: ctypes.Structure, prefix: str = "") -> Iterator[tuple[str, type, Any]]:
    """Name, ctype and value of all that a structure holds; a null pointer is None."""
    for name, kind in given._fields_:
        value = getattr(given, name)
        if isinstance(value, ctypes.Structure):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, kind, value


def keep_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """What is launched from now on, as many blocks as there could be work for."""
    found: list[Launched] = []

    def kernel(what):
        def launch(device, stream, grid, arguments, early):
            assert stream == STREAM
            if isinstance(what, Variant):
                (structure,) = arguments
                named = {name: value for name, _, value in flat(structure)}
            else:
                known = parameters(what)
                assert [type(argument) for argument in arguments] == list(known.values())
                values = [argument.value for argument in arguments]
                named = dict(zip(known, values, strict=True))
            found.append(Launched(what, grid, named, early))

        return SimpleNamespace(launch=launch)

    monkeypatch.delenv("EXACTMOE_TILE", raising=False)
    monkeypatch.setattr(experts, "kernel", kernel)
    monkeypatch.setattr(experts, "processors", lambda device: MANY)
    monkeypatch.setattr(experts, "counters", lambda device: COUNTERS)
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return found


def told(projections: dict[str, CudaWeight], routes: RouteTable, **others: Any) -> dict[str, Any]:
    """What a launch is told, by name; all that is not given is null or 0.

    Args:
        projections: "gate", "up", "down".
        others: numbers, tensors (`slots` are those of the route table, `out` the call's), and Rows.
    """
    expected = {name: None if kind is ctypes.c_void_p else 0 for name, kind, _ in flat(Arguments())}
    for name, weight in projections.items():
        expected |= addresses(name, weight)
    tensors = {"offsets": routes.offsets, "slots": routes.slots, "counters": COUNTERS}
    for name, value in {**tensors, **others}.items():
        if isinstance(value, Rows):
            wide = value.packed if value.scales is not None else None
            parts = {"values": value.values, "wide": wide, "scales": value.scales}
            found = {f"{name}.{part}": tensor for part, tensor in parts.items()}
        else:
            found = {name: value}
        assert set(found) <= set(expected)
        expected |= {n: v.data_ptr() if isinstance(v, Tensor) else v for n, v in found.items()}
    return expected


def weight(
    format="nvfp4", num_experts=4, rows=256, columns=384, divide=False, units="bf16"
) -> CudaWeight:
    """Of units "both", the even experts are on the fp8 units."""
    codes = torch.empty(num_experts, rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(num_experts, rows, columns // BLOCK[format], dtype=torch.uint8)
    on_fp8 = torch.full((num_experts,), units != "bf16", dtype=torch.uint8)
    if units == "both":
        on_fp8[1::2] = 0
    return CudaWeight(format, codes, scales, torch.empty(num_experts), divide, units, on_fp8)


def routes_of(num_slots: int, num_experts: int) -> RouteTable:
    """Of no particular slots."""
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    return RouteTable(offsets, torch.empty(num_slots, dtype=torch.int32), torch.zeros(1))


def addresses(name: str, weight: CudaWeight) -> dict[str, int]:
    """What a launch is told of a projection."""
    return {
        f"{name}.codes": weight.codes.data_ptr(),
        f"{name}.scales": weight.scales.data_ptr(),
        f"{name}.code_stride": weight.codes.stride(0),
        f"{name}.scale_stride": weight.scales.stride(0),
        f"{name}.factors": weight.factors.data_ptr(),
        f"{name}.on_fp8": weight.on_fp8.data_ptr(),
    }
