"""The architectures with a path: one row each, and what has been shown of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exactmoe.errors import ConfigError, Unsupported

MEASURED, UNTESTED = "measured", "compiled, untested"


@dataclass(frozen=True)
class Architecture:
    """One exact architecture (contract section 4).

    Attributes:
        name: as compilers call it: "sm_90", "gfx942".
        backends: that it has, the fastest first.
        instruction: of the bf16 matrix units, the same in every tile; its k step is 16.
        support: "measured" (its bits and times), or "compiled, untested".
        cards: what is sold with it.
        fp8_instruction: of the fp8 matrix units, where class `a8` takes them; its k step is 32.
        early: small kernels may start while the kernel before them ends.
    """

    name: str
    backends: tuple[str, ...]
    instruction: str
    support: str
    cards: str
    fp8_instruction: str = ""
    early: bool = False


_MMA = "mma.sync m16n8k16"
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_80", ("triton",), _MMA, UNTESTED, "A100"),
        Architecture("sm_86", ("triton",), _MMA, UNTESTED, "RTX 30, A40"),
        Architecture("sm_89", ("triton",), _MMA, UNTESTED, "RTX 40, L40"),
        Architecture(
            "sm_90",
            ("cuda", "triton"),
            "wgmma m64nNk16",
            MEASURED,
            "H100, H200",
            "wgmma m64nNk32",
            early=True,
        ),
        Architecture("sm_100", ("triton",), "tcgen05.mma", UNTESTED, "B200", early=True),
        Architecture("sm_120", ("triton",), _MMA, UNTESTED, "RTX 50, RTX PRO 6000"),
        Architecture("sm_121", ("triton",), _MMA, UNTESTED, "DGX Spark"),
        Architecture("gfx942", ("triton",), "v_mfma bf16", UNTESTED, "MI300"),
        Architecture("gfx950", ("triton",), "v_mfma bf16", UNTESTED, "MI350"),
    )
}


def architecture_name(device: torch.device) -> str:
    """The exact architecture of a device: "sm_90", "gfx942"; "cpu" of a CPU."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def architecture_of(device: torch.device) -> Architecture:
    """The row of a GPU.

    Raises:
        Unsupported: it has none; the message lists those that have.
    """
    name = architecture_name(device)
    if name not in ARCHITECTURES:
        raise Unsupported(
            f"{device} is {name}, which has no path; allowed: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def require_one_architecture(devices: Sequence[torch.device]) -> None:
    """ConfigError unless all cards of a layer give the same bits (contract section 4)."""
    names = [architecture_name(device) for device in devices]
    if len(set(names)) > 1:
        cards = ", ".join(f"{device} ({name})" for device, name in zip(devices, names, strict=True))
        raise ConfigError(f"cards are {cards}; allowed: one architecture, for its bits")
