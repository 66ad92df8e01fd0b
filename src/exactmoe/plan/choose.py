"""Choice of a backend. On one device it changes speed, never a bit; one that cannot run says why.

The fast path of sm_90 and the portable one multiply by one instruction with k ascending, so they
give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from exactmoe import env
from exactmoe.config import DEVICE_TYPES, Numerics
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.plan.architectures import MEASURED, Architecture, architecture_of

BACKENDS = ("cuda", "triton", "cpu", "reference")
TRITON_INTERPRET = "TRITON_INTERPRET"
_ON_CPU, _ON_GPU = ("cpu", "reference"), ("cuda", "triton")
_PANEL = 128
_ALIGNMENT = 16
_DENSE_MULTIPLE = 64
_FP4 = ("nvfp4", "mxfp4")
_INSTALL = "pip install 'exactmoe[cuda]'"


class WeightShape(NamedTuple):
    """Format, rows N and columns K of one projection of routed experts or of a dense MLP; whether
    the rows of an expert lie one after the other, and whether each begins at a multiple of 16
    bytes.
    """

    format: str
    rows: int
    columns: int
    contiguous: bool = True
    aligned: bool = True

    @classmethod
    def of(cls, format: str, codes: torch.Tensor) -> "WeightShape":
        """Of codes [E, N, bytes], or bfloat16 [E, N, K]."""
        columns = codes.shape[2] * (2 if format in _FP4 else 1)
        # From the strides: a buffer may have given its memory back, and then has no views.
        contiguous = codes.stride()[1:] == (codes.shape[2], 1)
        places = (codes.data_ptr(), codes.stride(1) * codes.element_size())
        aligned = codes.stride(2) == 1 and all(place % _ALIGNMENT == 0 for place in places)
        return cls(format, codes.shape[1], columns, contiguous, aligned)


@dataclass(frozen=True)
class Rejected:
    """A backend that was not taken, and why."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The backend that runs, on which device, why, and what was not taken; of a layer of `a8`, its
    Numerics.units.
    """

    backend: str
    device: str
    reason: str
    rejected: tuple[Rejected, ...] = ()
    units: str = ""

    @property
    def path(self) -> str:
        """Name of the ops that run: the backend's, or those of a class of it (ops/__init__.py)."""
        if self.backend != "cuda" or not self.units:
            return self.backend
        return "cuda_a8" + ("" if self.units == "auto" else f"_{self.units}")

    @property
    def tiles(self) -> str:
        """The table of its tiles (plan/tiles.py)."""
        return "cuda_a8" if self.path.startswith("cuda_a8") else self.backend

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.device}: {self.reason}"]
        lines += [f"  not {r.backend}: {r.reason}" for r in self.rejected]
        return "\n".join(lines)


def choose(
    numerics: Numerics,
    device: torch.device,
    requested: str = "auto",
    experts: tuple[WeightShape, ...] = (),
    fixed_order: bool = False,
    dense: tuple[WeightShape, ...] = (),
) -> Plan:
    """The backend for a layer with these numerics on this device.

    Args:
        numerics: of the layer.
        device: where its weights are.
        requested: "auto", or the name of a backend.
        experts: gate, up and down of the routed experts; none of a dense part.
        fixed_order: the bytes of the experts may not be rearranged.
        dense: gate, up and down of a dense MLP; none of a linear layer, and none of a shared
            expert, which runs where its layer does.

    Raises:
        ConfigError: no backend has the requested name.
        Unsupported: the device has no path, or the requested one cannot run there.
    """
    if requested not in ("auto", *BACKENDS):
        raise ConfigError(f"backend is {requested!r}; allowed: auto, {', '.join(BACKENDS)}")
    if device.type not in DEVICE_TYPES:
        raise Unsupported(f"device is {device}; this version runs on: {', '.join(DEVICE_TYPES)}")
    asked = env.read("EXACTMOE_BACKEND") if requested == "auto" else requested
    call = _Call(numerics, device, requested, experts, fixed_order, dense)
    return _chosen(call, asked, env.read(TRITON_INTERPRET))


def backends(device: torch.device) -> tuple[str, ...]:
    """The backends that a device of this type may have, the fastest first."""
    interpreted = ("triton",) if env.read(TRITON_INTERPRET) else ()
    return _ON_GPU if device.type == "cuda" else (*_ON_CPU, *interpreted)


@dataclass(frozen=True)
class _Call:
    """The arguments of `choose`."""

    numerics: Numerics
    device: torch.device
    requested: str
    experts: tuple[WeightShape, ...]
    fixed_order: bool
    dense: tuple[WeightShape, ...]


@cache
def _chosen(call: _Call, asked: str, interpreted: bool) -> Plan:
    requested, device, experts = call.requested, call.device, call.experts
    obstacles = {name: _obstacle(name, call, interpreted) for name in BACKENDS}
    reason = f"backend={requested!r} was asked for"
    if requested == "auto":
        reason = f"EXACTMOE_BACKEND={asked}"
    if asked == "auto":
        offered = _ON_GPU if device.type == "cuda" else ("cpu",)
        able = [name for name in offered if obstacles[name] is None]
        if not able:
            raise Unsupported("; ".join(f"{name}: {obstacles[name]}" for name in offered))
        taken, reason = able[0], "the fast path of this device"
        if device.type == "cuda" and taken != "cuda":
            reason = "the portable path of this device"
    else:
        taken = asked
        unfit = obstacles["cuda"] if taken == "cuda" and not experts else None
        if unfit is not None and obstacles["triton"] is None:
            taken, reason = "triton", f"{reason}; this part runs on the portable kernels: {unfit}"
        obstacle = obstacles[taken]
        if obstacle is not None:
            able = [name for name in backends(device) if obstacles[name] is None]
            raise Unsupported(
                f"backend {asked!r} cannot run on {device}: {obstacle}; "
                f"allowed: auto, {', '.join(able)}"
            )
    rejected = tuple(
        Rejected(name, obstacles[name] or _NOT_TAKEN[name]) for name in BACKENDS if name != taken
    )
    remarks = _remarks(call.numerics, device, taken)
    return Plan(taken, str(device), reason + remarks, rejected, call.numerics.a8_units)


_NOT_TAKEN = {
    "cuda": "not asked for",
    "triton": "portable: same bits, slower",
    "cpu": "not asked for",
    "reference": "the definition: same bits, plain loops, slow",
}


def _remarks(numerics: Numerics, device: torch.device, taken: str) -> str:
    """What else the reason has to say."""
    remarks = ""
    if device.type == "cuda":
        row = architecture_of(device)
        remarks += f" ({row.name}, {row.instruction})"
        if row.support != MEASURED:
            remarks += f"; {row.name} is {row.support}"
    elif taken == "triton":
        remarks += "; interpreted, for tests"
    if numerics.units != "bf16" and taken != "cuda":
        where = "a CPU" if device.type == "cpu" else architecture_of(device).name
        remarks += f"; units={numerics.units!r} run as bf16 units on {where} (contract section 3)"
    return remarks


def _obstacle(name: str, call: _Call, interpreted: bool) -> str | None:
    """Why a backend cannot run, or None."""
    device = call.device
    if name in _ON_CPU:
        if device.type == "cpu":
            return None
        return "it computes on a CPU, whose order of the dots gives other bits than a GPU's"
    if device.type == "cpu":
        if name == "triton" and interpreted:
            return _missing_triton() or _mixed(call)
        hint = f" ({TRITON_INTERPRET}=1 lets triton be interpreted on a CPU)"
        return "it needs a GPU" + (hint if name == "triton" else "")
    row = architecture_of(device)
    if name not in row.backends:
        return f"it needs compute capability 9.0 (sm_90); {device} is {row.name}"
    if name == "triton":
        return _missing_triton() or _mixed(call) or _on_fp8_units(call, row)
    return _missing_triton() or _missing_cuda() or _mixed(call) or _unfit(call)


def _mixed(call: _Call) -> str | None:
    """Why the kernels of a GPU, which multiply gate and up together, do not take these."""
    if not call.experts or call.experts[0].format == call.experts[1].format:
        return None
    gate, up = (weight.format for weight in call.experts[:2])
    return f"gate is {gate} and up is {up}; it takes one format for both"


def _on_fp8_units(call: _Call, row: Architecture) -> str | None:
    """Why the portable kernels, which have no fp8 units, would give other bits."""
    if not row.fp8_instruction or call.numerics.units == "bf16":
        return None
    if all(weight.format not in _FP4 for weight in call.experts):
        return None
    return (
        f"units={call.numerics.units!r} may take the fp8 units on {row.name}, which give other "
        "bits and which it has no kernels for; it runs units='bf16'"
    )


def _missing_triton() -> str | None:
    return None if _importable("triton") else f"triton is not installed: {_INSTALL}"


def _missing_cuda() -> str | None:
    if _importable("cuda.bindings.nvrtc"):
        return None
    return f"cuda-bindings is not installed: {_INSTALL}"


@cache
def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of it is absent
        return False


def _unfit(call: _Call) -> str | None:
    """Why the kernels of the fast path do not take these experts."""
    if not call.experts:
        return dense_obstacle(call.dense)
    if call.fixed_order:
        return "it rearranges the experts' bytes, which belong to a module that reads them too"
    for name, weight in zip(("gate", "up", "down"), call.experts, strict=True):
        if weight.format not in _FP4:
            return f"{name} is {weight.format}; it takes {', '.join(_FP4)}"
        if not weight.contiguous:
            return f"the rows of an expert of {name} do not lie one after the other in memory"
        if weight.rows % _PANEL or weight.columns % _PANEL:
            return (
                f"{name} has {weight.rows} rows and {weight.columns} columns; "
                f"it takes multiples of {_PANEL}"
            )
    return None


def dense_obstacle(dense: Sequence[WeightShape]) -> str | None:
    """Why the dense kernels of the fast path do not take gate, up and down, or gate and up (shapes
    of a dense MLP or shared expert); None: they do.
    """
    if not dense:
        return "it has kernels for routed experts and dense MLPs, none for a linear layer"
    for name, weight in zip(("gate", "up", "down"), dense, strict=False):
        if weight.format != "bf16":
            return f"dense {name} is {weight.format}; it takes bf16"
        if weight.rows % _DENSE_MULTIPLE or weight.columns % _DENSE_MULTIPLE:
            return (
                f"dense {name} has {weight.rows} rows and {weight.columns} columns; "
                f"it takes multiples of {_DENSE_MULTIPLE}"
            )
        if not weight.aligned:
            return f"the rows of dense {name} do not begin at multiples of {_ALIGNMENT} bytes"
    return None
