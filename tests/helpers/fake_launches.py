"""Launches of the routed experts' kernels on sm_90 that are kept and not run: the kernel is a fake,
and tensors are on the CPU.
"""

import ctypes
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exactmoe.kernels.cuda.source import Pack, Variant
from exactmoe.ops.cuda import experts
from exactmoe.ops.cuda.prepare import CudaWeight
from exactmoe.runtime.routes import RouteTable

STREAM, MANY = 77, 10**9
BLOCK = {"nvfp4": 16, "mxfp4": 32}
_C_TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "float": ctypes.c_float}


@dataclass(frozen=True)
class Launched:
    """One launch; arguments by the names of the kernel's C parameters."""

    what: Variant | Pack
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    early: bool


def parameters(what: Variant | Pack) -> dict[str, type]:
    """Names and ctypes of the kernel's parameters, from its source."""
    text, entry = what.text(), what.entry
    (found,) = re.findall(rf"^{entry}\((.*?)\) \{{", text, re.M | re.S)
    a8 = re.search(r"^#if A8\n(.*?)^#endif\n?", found, re.M | re.S)
    if a8 is not None:
        found = found.replace(a8[0], a8[1] if what.activation == "a8" else "")
    names = {}
    for parameter in found.split(","):
        kind, name = parameter.strip().rsplit(" ", 1)
        names[name] = ctypes.c_void_p if kind.endswith("*") else _C_TYPES[kind]
    return names


def keep_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """What is launched from now on, as many blocks as there could be work for."""
    found: list[Launched] = []

    def kernel(what):
        def launch(device, stream, grid, arguments, early):
            assert stream == STREAM
            known = parameters(what)
            assert [type(argument) for argument in arguments] == list(known.values())
            values = [argument.value for argument in arguments]
            found.append(Launched(what, grid, dict(zip(known, values, strict=True)), early))

        return SimpleNamespace(launch=launch)

    monkeypatch.delenv("EXACTMOE_TILE", raising=False)
    monkeypatch.setattr(experts, "kernel", kernel)
    monkeypatch.setattr(experts, "processors", lambda device: MANY)
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return found


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


def addresses(prefix: str, weight: CudaWeight) -> dict[str, int]:
    """What a launch is told of a projection."""
    return {
        f"{prefix}_codes": weight.codes.data_ptr(),
        f"{prefix}_scales": weight.scales.data_ptr(),
        f"{prefix}_factors": weight.factors.data_ptr(),
        f"{prefix}_code_stride": weight.codes.stride(0),
        f"{prefix}_scale_stride": weight.scales.stride(0),
    }
