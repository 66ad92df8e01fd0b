"""Choice of a backend. A backend changes speed, never a bit; one that cannot run says why."""

from dataclasses import dataclass

import torch

from exactmoe import env
from exactmoe.config import DEVICE_TYPES, Numerics
from exactmoe.errors import ConfigError, Unsupported

BACKENDS = ("cpu", "reference")


@dataclass(frozen=True)
class Rejected:
    """A backend that was not taken, and why."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The backend that runs, on which device, why, and what was not taken."""

    backend: str
    device: str
    reason: str
    rejected: tuple[Rejected, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.device}: {self.reason}"]
        lines += [f"  not {r.backend}: {r.reason}" for r in self.rejected]
        return "\n".join(lines)


def choose(numerics: Numerics, device: torch.device, requested: str = "auto") -> Plan:
    """The backend for a layer with these numerics on this device.

    Raises:
        ConfigError: no backend has the requested name.
        Unsupported: the device, or units="fp8", has no path in this version.
    """
    if requested not in ("auto", *BACKENDS):
        raise ConfigError(f"backend is {requested!r}; allowed: auto, {', '.join(BACKENDS)}")
    if device.type not in DEVICE_TYPES:
        raise Unsupported(f"device is {device}; this version runs on: {', '.join(DEVICE_TYPES)}")
    wanted, reason = requested, f"backend={requested!r} was asked for"
    if requested == "auto":
        wanted = env.read("EXACTMOE_BACKEND")
        reason = f"EXACTMOE_BACKEND={wanted}"
        if wanted == "auto":
            wanted, reason = "cpu", "the fast path of this device"
    others = {"cpu": "not asked for", "reference": "the definition: same bits, plain loops, slow"}
    rejected = tuple(Rejected(name, others[name]) for name in BACKENDS if name != wanted)
    if numerics.units != "bf16":
        reason += f"; units={numerics.units!r} run as bf16 units on a CPU (contract section 3)"
    return Plan(wanted, str(device), reason, rejected)
