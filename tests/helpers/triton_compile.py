"""Compiles what the launchers of ops/triton launch, for any architecture, without its card.

A process that has interpreted kernels cannot compile, so tests run this in one of their own:
`launches_of` takes a launcher's call (its tensors may be on meta) and gives the kernels that it
would have launched; `assembly` compiles one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launched:
    """A kernel, its arguments by name, and the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


def launches_of(call: Callable[[], object]) -> list[Launched]:
    """The launches of call(); none of them runs."""
    found = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in _OPTIONS if name in named}
        known = dict(zip(self.arg_names, arguments, strict=False)) | named
        assert set(known) == set(self.arg_names), sorted(set(known) ^ set(self.arg_names))
        found.append(Launched(self, known, options))

    run = triton.JITFunction.run
    triton.JITFunction.run = record
    try:
        call()
    finally:
        triton.JITFunction.run = run
    return found


def assembly(launched: Launched, architecture: str) -> dict[str, Any]:
    """The stages' texts ("ttgir", "ptx" or "amdgcn") and the binary of "sm_90" or "gfx942"."""
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for place, parameter in enumerate(launched.kernel.params):
        value = launched.arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple(_type(part) for part in value)
            aligned = [index for index, part in enumerate(value) if _is_aligned(part)]
            attributes |= {(place, index): _ALIGNED for index in aligned}
        else:
            signature[parameter.name] = _type(value)
            attributes |= {(place,): _ALIGNED} if _is_aligned(value) else {}
    target = (
        GPUTarget("hip", architecture, 64)
        if architecture.startswith("gfx")
        else GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    )
    options = launched.options
    if target.backend == "hip":
        options = options | {"matrix_instr_nonkdim": 16}  # a launcher asks for it on such a card
    source = ASTSource(launched.kernel, signature, constants, attributes)
    return dict(triton.compile(source, target=target, options=options).asm)


def _is_aligned(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
