"""The fingerprint of a machine: what a proof was run on.

Known answers are filed under the architecture: every CPU gives the same bits, and every card of one
exact architecture.
"""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from exactmoe.config import CONTRACT_VERSION
from exactmoe.plan import architecture_name

_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def package_version(name: str = "exactmoe") -> str:
    """The version of an installed package; a source tree on the path has none, and says so."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def fingerprint(device: torch.device | None = None) -> dict[str, Any]:
    """Architecture, contract version, and the programs and processor that ran. Plain values."""
    device = device or torch.device("cpu")
    return {
        "architecture": architecture_name(device),
        **_card(device),
        "contract": CONTRACT_VERSION,
        "exactmoe": package_version(),
        "torch": torch.__version__,
        "transformers": package_version("transformers"),
        "numba": package_version("numba"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _card(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return {
        "card": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": package_version("triton"),
        "driver": _driver(),
    }


def _driver() -> str:
    """The version of NVIDIA's kernel module ("NVRM version: ... 580.82.07 ...")."""
    if not _NVIDIA_DRIVER.is_file():
        return "unknown"
    match = re.search(r"NVRM version:.*?(\d+\.\d[\d.]*)", _NVIDIA_DRIVER.read_text())
    return "unknown" if match is None else match[1]


def _cpu_name() -> str:
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
