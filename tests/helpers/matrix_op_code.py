"""`python matrix_op_code.py`: compiles launches of the matrix ops for every architecture, and
prints what tests look for in the machine code, as JSON. Nothing runs; tensors are on meta. With
`ends`, of the tiles that differ in nothing but their width the narrowest and the widest.

It is a program because a process that has interpreted kernels cannot compile any more.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from exactmoe.formats import PackedWeight
from exactmoe.formats.rows import Rows
from exactmoe.ops.triton import dense_linear, dense_mlp, down, gate_up
from exactmoe.ops.triton.launch import Launch
from exactmoe.ops.triton.prepare import TritonWeight, prepare
from exactmoe.plan.architectures import ARCHITECTURES
from exactmoe.plan.tiles import ON_ARCHITECTURE, TILES, Tile
from exactmoe.runtime.routes import RouteTable
from triton_compile import Launched, assembly

MAIN = "sm_90"
DISASSEMBLED = ("sm_80", MAIN, "sm_120")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_E, _TOKENS, _TOP_K, _H, _I = 256, 8, 8, 4096, 2048
_DTYPES = {"a16": torch.bfloat16, "a8": torch.float32}
# Two segments, the second one step long.
_SHORT_SEGMENT = 4096 + 128


def tiles(op: str, architecture: str) -> tuple[Tile, ...]:
    """The tiles of an op on the portable path."""
    return ON_ARCHITECTURE.get(("triton", architecture), {}).get(op) or TILES["triton"][op]


def case(op: str, format: str, activation: str, tile: Tile, architecture: str) -> Launch:
    """The launch of an op at the sizes of a real layer."""
    h_type, routes = _DTYPES[activation], _routes()
    scaled, slots = activation == "a8", _TOKENS * _TOP_K
    if op == "gate_up":
        weight, h = _weight(format, _E, _I, _H), _empty(slots, _I, dtype=h_type)
        routing = _empty(_TOKENS, _TOP_K) if scaled else None
        rows = _rows(_TOKENS, _H, scaled)
        return gate_up.launch(
            rows, (weight, weight), routes, (routing, 10.0), h, tile, architecture
        )
    if op == "up_after_gate":
        weight, h = _weight(format, _E, _I, _H), _empty(slots, _I, dtype=h_type)
        outputs = (h if scaled else _empty(slots, _I), h)
        activation = (_empty(_TOKENS, _TOP_K) if scaled else None, 10.0)
        rows = _rows(_TOKENS, _H, scaled)
        given = (rows, (weight, weight), routes, activation, outputs)
        return gate_up.launches(*given, tile, architecture)[1]
    if op == "dense_linear":
        weight, x = _weight(format, 8, 1024, _H), _empty(_TOKENS, 8, _H, dtype=torch.bfloat16)
        return dense_linear.launch(x, weight, _empty(_TOKENS, 8, 1024), tile, architecture)
    if op == "down":
        weight, out = _weight(format, _E, _H, _I), _empty(slots, _H, dtype=h_type)
        rows = _rows(slots, _I, scaled)
        return down.launch(rows, weight, routes, not scaled, out, tile, architecture)
    hidden = _SHORT_SEGMENT if op == "dense_segments" else _H
    weights = _weight(format, 1, _I, hidden), _weight(format, 1, hidden, _I)
    if op == "dense_segments":
        weights = _weight(format, 1, _I, _H), _weight(format, 1, _H, hidden)
    x = _empty(_TOKENS, weights[0].weight.columns, dtype=torch.bfloat16)
    h = _empty(_TOKENS, weights[1].weight.columns, dtype=torch.bfloat16)
    out = _empty(_TOKENS, weights[1].weight.rows)
    given = (weights[0], weights[0], weights[1]), None, h, out, tile, architecture
    return dense_mlp.launches(x, *given)[op != "dense_gate_up"]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _weight(format: str, experts: int, rows: int, columns: int) -> TritonWeight:
    if format == "bf16":
        return prepare(PackedWeight("bf16", _empty(experts, rows, columns, dtype=torch.bfloat16)))
    width = columns if format == "fp8" else columns // 2
    codes = _empty(experts, rows, width, dtype=torch.uint8)
    if format == "fp8":
        scales = _empty(experts, -(-rows // 128), -(-columns // 128))
        return prepare(PackedWeight("fp8", codes, scales))
    block = 16 if format == "nvfp4" else 32
    scales = _empty(experts, rows, columns // block, dtype=torch.uint8)
    factors = _empty(experts) if format == "nvfp4" else None
    return prepare(PackedWeight(format, codes, scales, factors))


def _rows(count: int, columns: int, scaled: bool) -> Rows:
    if scaled:
        codes = _empty(count, columns, dtype=torch.float8_e4m3fn)
        return Rows(codes, _empty(count, columns // 128))
    return Rows(_empty(count, columns, dtype=torch.bfloat16), None)


def _routes() -> RouteTable:
    slots = _empty(_TOKENS * _TOP_K, dtype=torch.int32)
    return RouteTable(_empty(_E + 1, dtype=torch.int32), slots, _empty(1, dtype=torch.int64))


def facts(launch: Launch, disassemble: bool) -> dict[str, Any]:
    """Counts of the assembler's instructions, columns in a row of a lane (kWidth), shared memory;
    of the machine code first instructions of chains, float32 ones, registers and spills.
    """
    arguments = launch.arguments | launch.all_constants
    asm = assembly(Launched(launch.kernel, arguments, launch.options), launch.architecture)
    text = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    names = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][a-z0-9_.:]*)", text, re.M)
    names += re.findall(r"\.amdhsa_float_denorm_mode_\w+ \d", text)
    found: dict[str, Any] = {
        "counts": _counts(names),
        "options": launch.options,
        "columns": sorted({int(width) for width in re.findall(r"kWidth = (\d+)", asm["ttgir"])}),
    }
    return found | _machine_code(asm["cubin"]) if disassemble else found


def _machine_code(binary: bytes) -> dict[str, Any]:
    texts = []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        for option in ("-sass", "-res-usage"):
            command = [str(_CUOBJDUMP), option, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            texts.append(done.stdout + done.stderr)
    names = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", texts[0], re.M)
    return {
        "machine": _counts(names),
        "starts": len(re.findall(r"H?G?MMA\.\S+ .*, RZ[, ]", texts[0])),
        "registers": int(re.findall(r"REG:(\d+)", texts[1])[0]),
        "stack": int(re.findall(r"STACK:(\d+)", texts[1])[0]),
    }


def _counts(names: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def cases(architecture: str, ends: bool) -> list[tuple[str, str, str, Tile]]:
    """What is compiled: every width in the format without unpacking, and each kind of chain."""

    def chosen(op: str) -> tuple[Tile, ...]:
        every = tiles(op, architecture)
        return (every[0], every[-1]) if ends else every

    of_down, of_dense = chosen("down"), chosen("dense_mlp")
    found = [("down", "bf16", "a16", tile) for tile in of_down]
    found += [("down", "mxfp4", "a8", of_down[0])]
    if architecture in DISASSEMBLED:
        found += [("down", "mxfp4", "a8", of_down[-1])]
        found += [("down", "fp8", "a16", of_down[0]), ("down", "nvfp4", "a16", of_down[0])]
        found += [("dense_segments", "bf16", "a16", of_dense[0])]
        found += [("dense_linear", "fp8", "a16", of_dense[0])]
    if architecture == MAIN:
        found += [("gate_up", "nvfp4", "a16", tile) for tile in chosen("gate_up")]
        found += [("up_after_gate", "nvfp4", "a16", chosen("gate_up")[0])]
        found += [("dense_linear", "fp8", "a16", tile) for tile in of_dense[1:]]
        found += [("dense_gate_up", "bf16", "a16", tile) for tile in of_dense]
    return found


def main() -> None:
    found = {}
    for architecture in ARCHITECTURES:
        for op, format, activation, tile in cases(architecture, sys.argv[1:] == ["ends"]):
            name = f"{op} {format} {activation} {tile.tokens}@{architecture}"
            chains = format != "bf16" or op == "dense_segments"
            disassemble = architecture in DISASSEMBLED and (chains or architecture == MAIN)
            found[name] = facts(case(op, format, activation, tile, architecture), disassemble)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
