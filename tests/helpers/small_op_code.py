"""`python small_op_code.py`: compiles every launch of the small ops for every architecture, and
prints what tests look for in the machine code, as JSON.

It is a program because a process that has interpreted kernels cannot compile any more.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import function_kernels
from exactmoe.config import Numerics, RouterConfig
from exactmoe.formats.rows import Rows
from exactmoe.ops.triton import early
from exactmoe.ops.triton.combine import combine
from exactmoe.ops.triton.finish import finish
from exactmoe.ops.triton.quantize import quantize
from exactmoe.ops.triton.route_table import route_table
from exactmoe.ops.triton.router import router_logits, select
from exactmoe.runtime.routes import RouteTable
from triton_compile import assembly, launches_of

MAIN = "sm_90"
OTHERS = ("sm_80", "sm_100", "sm_120", "gfx942")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_E, _H, _K = 288, 4096, 8


@dataclass
class _Weights:
    bias: Tensor | None
    table: Tensor | None
    config: RouterConfig


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _routed(tokens: int) -> tuple[Tensor, Tensor]:
    return _empty(tokens, _K, dtype=torch.int32), _empty(tokens, _K)


def _logits(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    parts = _empty(16, tokens, _E) if tokens <= 64 else None
    x, weight = _empty(tokens, hidden, dtype=torch.bfloat16), _empty(_E, hidden, dtype=dtype)
    router_logits(x, weight, _empty(tokens, _E), parts)


def _select(score: str, hashed: bool, narrow: bool) -> None:
    table = _empty(1000, _K, dtype=torch.int64) if hashed else None
    weights = _Weights(None if hashed else _empty(_E), table, RouterConfig(score, 2.5))
    tokens = _empty(1, dtype=torch.int64) if hashed else None
    parts = _empty(16, 1, _E) if narrow else None
    select(_empty(1, _E), weights, tokens, Numerics(), _routed(1), parts)


def _route(tokens: int) -> None:
    slots = _empty(tokens * _K, dtype=torch.int32)
    fault = _empty(1, dtype=torch.int64)
    routes = RouteTable(_empty(_E + 1, dtype=torch.int32), slots, fault)
    route_table(_empty(tokens, _K, dtype=torch.int32), _E, routes)


def _combine(numerics: Numerics, shared: bool, top_k: int = _K) -> None:
    slots = _empty(top_k, _H, dtype=torch.bfloat16 if numerics.slot == "bf16" else torch.float32)
    routed = (_empty(1, top_k, dtype=torch.int32), _empty(1, top_k))
    y = _empty(1, _H, dtype=torch.bfloat16)
    combine(slots, routed, _E, numerics, _empty(1, _H) if shared else None, y)


def _quantize(dtype: torch.dtype) -> None:
    out = Rows(_empty(8, _H, dtype=torch.float8_e4m3fn), _empty(8, _H // 128))
    quantize(_empty(8, _H, dtype=dtype), out)


def _swiglu() -> None:
    x, kernel = _empty(4096), triton.jit(function_kernels.swiglu)
    kernel[(1,)](x, x, x, 10.0, 4096, True, 128, num_warps=4, enable_fp_fusion=False)


# Compiled for every architecture.
CALLS: dict[str, Callable[[], None]] = {
    "logits narrow": lambda: _logits(1, _H, torch.bfloat16),
    "logits wide": lambda: _logits(1024, _H, torch.bfloat16),
    "logits f32": lambda: _logits(1, _H, torch.float32),
    "select": lambda: _select("sigmoid", hashed=False, narrow=True),
    "route_table": lambda: _route(512),
    "combine a16": lambda: _combine(Numerics(), shared=True),
    "quantize": lambda: _quantize(torch.bfloat16),
    "finish": lambda: finish(_empty(4, _H), _empty(4, _H, dtype=torch.bfloat16)),
    "swiglu": _swiglu,
}
# What tells when memory that other kernels share is first touched, in PTX and in machine code.
_WAIT, _START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_ORDER = re.compile(
    rf"{_WAIT}|{_START}|\b(?:ld|st|red|atom)\.[\w.]*global|\bcp\.async\.(?:ca|cg|bulk)"
    r"|\b(?:ACQBULK|PREEXIT|LDG|STG|LDGSTS|UTMALDG|UBLKCP|RED|ATOM)\b"
)
_MACHINE_NAMES = {"ACQBULK": _WAIT, "PREEXIT": _START}
# Compiled for sm_90.
MORE: dict[str, Callable[[], None]] = {
    "logits one step": lambda: _logits(1024, 256, torch.bfloat16),
    "logits f32 wide": lambda: _logits(128, _H, torch.float32),
    "select wide": lambda: _select("sqrt_softplus", hashed=False, narrow=False),
    "select hashed": lambda: _select("sqrt_softplus", hashed=True, narrow=True),
    "route_table 1": lambda: _route(1),
    "route_table 8192": lambda: _route(8192),
    "combine a8": lambda: _combine(Numerics.preset("a8"), shared=True),
    "combine 64": lambda: _combine(Numerics(), True, top_k=64),
    "combine alone": lambda: _combine(Numerics(), shared=False),
    "quantize f32": lambda: _quantize(torch.float32),
}


def _facts(asm: dict[str, Any]) -> dict[str, Any]:
    """Counts of instructions of the last text stage; sums of blocks in the one before."""
    text = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    names = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.:]*)", text, re.M)
    modes = re.findall(r"\.amdhsa_float_denorm_mode_\w+ \d", text)
    counts: dict[str, int] = {}
    for name in names + modes:
        counts[name] = counts.get(name, 0) + 1
    return {"counts": counts, "sums": asm["ttgir"].count("arith.addf"), "order": _order(text)}


def _order(text: str) -> list[str]:
    """Wait and start as PTX calls them, and "memory", as they follow one another."""
    names = [_MACHINE_NAMES.get(name, name) for name in _ORDER.findall(text)]
    return [name if name in (_WAIT, _START) else "memory" for name in names]


def _usage(binary: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    found = text.stdout + text.stderr
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", found)}
    return usage | {"machine order": _order(found)}


def main() -> None:
    found = {}
    for name, call in (CALLS | MORE).items():
        for architecture in (MAIN, *OTHERS) if name in CALLS else (MAIN,):
            early.architecture = lambda _, it=architecture: it  # a launcher's card
            (launched,) = launches_of(call)
            asm = assembly(launched, architecture)
            facts = _facts(asm)
            facts["waits"] = launched.arguments.get("PDL", False)
            facts["asks"] = launched.options.get("launch_pdl", False)
            if architecture == MAIN:
                facts |= _usage(asm["cubin"])
            found[f"{name}@{architecture}"] = facts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
