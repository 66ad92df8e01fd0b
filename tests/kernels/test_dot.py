"""The tiles: order of the 16 lanes, chains, every code under every scale, and the machine code."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

from exactmoe.formats import PackedWeight, operand
from exactmoe.kernels.cpu import dot as kernels
from exactmoe.kernels.cpu.compile import OPTIONS
from exactmoe.ops.cpu.prepare import prepare
from exactmoe.reference import dot, dot_dense, dot_scaled
from exactmoe.reference.functions import canonical
from layers import assert_same_bits
from paths import random_weight
from tiles import run

FORMATS = ("nvfp4", "mxfp4", "bf16")
TILES = [
    (format, tokens, fused)
    for format in kernels.FORMATS
    for tokens in kernels.TOKENS
    for fused in (False, True)
]


@pytest.mark.parametrize("tokens", kernels.TOKENS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("format", "columns"),
    [(f, k) for f in FORMATS for k in (16, 32, 48, 160, 1056) if f != "mxfp4" or k % 32 == 0],
)
def test_one_chain(format, tokens, columns, fused, rng):
    weight = random_weight(rng, format, 1, 4, columns)
    x = torch.randn(tokens, columns, generator=rng).bfloat16().float()
    found = run(prepare(weight), x, columns, fused=fused)
    assert_same_bits(found, dot(operand(weight, 0), x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", kernels.TOKENS)
def test_chains_with_scales(format, tokens, rng):
    weight = random_weight(rng, format, 1, 4, 384)
    x = torch.randn(tokens, 384, generator=rng).bfloat16().float()
    scales = torch.rand(tokens, 3, generator=rng)
    found = run(prepare(weight), x, 128, scales)
    assert_same_bits(found, dot_scaled(operand(weight, 0), x, scales))


def test_segments_the_last_one_shorter(rng):
    weight = random_weight(rng, "bf16", 1, 4, 4096 + 48)
    x = torch.randn(4, 4096 + 48, generator=rng)
    assert_same_bits(run(prepare(weight), x, 4096), dot_dense(operand(weight, 0), x))


@pytest.mark.parametrize("tokens", kernels.TOKENS)
def test_f32_rows(tokens, rng):
    w, x = torch.randn(4, 96, generator=rng), torch.randn(tokens, 96, generator=rng)
    weight = prepare(PackedWeight("bf16", w.bfloat16()[None]))
    weight.experts[0, 0], weight.layout[2] = w.data_ptr(), 4 * 96
    assert_same_bits(run(weight, x, 96, format="f32"), dot(w, x))


@pytest.mark.parametrize("tokens", kernels.TOKENS)
def test_every_nvfp4_code_under_every_scale(tokens):
    """x picks one element at a time: what comes out is the operand itself."""
    codes = torch.arange(16).repeat_interleave(16).view(16, 16)
    columns = torch.arange(127)
    for first in range(0, 16, 4):
        packed = (codes[first : first + 4, ::2] | codes[first : first + 4, 1::2] << 4).byte()
        weight = PackedWeight(
            "nvfp4",
            packed.repeat(1, 127)[None],
            columns.byte().expand(1, 4, 127).contiguous(),
            torch.ones(1),
        )
        prepared, expected = prepare(weight), operand(weight, 0)
        for column in range(0, 127 * 16, 17):
            x = torch.zeros(tokens, 127 * 16)
            x[:, column] = 1.0
            found = run(prepared, x, 127 * 16)
            assert torch.equal(found, expected[:, column].expand(tokens, 4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, 1e-40])
def test_special_values(value, rng):
    weight = random_weight(rng, "nvfp4", 1, 4, 64)
    x = torch.randn(4, 64, generator=rng).bfloat16().float()
    x[1, 5] = value
    found, expected = run(prepare(weight), x, 64), dot(operand(weight, 0), x)
    assert_same_bits(canonical(found), canonical(expected))


@pytest.mark.parametrize(("format", "tokens", "fused"), TILES)
def test_arithmetic_is_neither_contracted_nor_reordered(format, tokens, fused):
    source = kernels.tile_source(format, tokens, fused)
    compiled = numba.njit(kernels.SIGNATURE, **OPTIONS)(source)
    (llvm,), (assembly,) = compiled.inspect_llvm().values(), compiled.inspect_asm().values()
    operations = re.findall(r"= f(?:mul|add|sub|div)\b[^\n]*", llvm)
    assert operations
    flags = re.compile(r"\b(fast|contract|reassoc|arcp|afn|nnan|ninf|nsz)\b")
    assert not [line for line in operations if flags.search(line)]
    assert "llvm.fmuladd" not in llvm
    if platform.machine() == "x86_64" and not fused:
        # The only fused operations are those that are written, at the end of a chain or block.
        written = 2 if format == "fp8" else 1
        assert written <= len(re.findall(r"\bvfn?m(?:add|sub)\w+", assembly)) <= 2 * written


def test_the_same_bits_on_a_processor_without_wide_registers():
    """The tile compiled for any x86-64 or ARMv8: 4 lanes at a time, fma from libm."""
    program = "import test_dot; print(test_dot.digest())"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    switches = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    environment = {**os.environ, **switches}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest()


def digest() -> str:
    """The bytes of two tiles, for a comparison of processes."""
    rng = torch.Generator().manual_seed(3)
    found = []
    for format in ("nvfp4", "fp8"):
        weight = random_weight(rng, format, 1, 4, 256)
        x = torch.randn(4, 256, generator=rng).bfloat16().float()
        found.append(run(prepare(weight), x, 128, torch.rand(4, 2, generator=rng)))
    return torch.stack(found).numpy().tobytes().hex()
