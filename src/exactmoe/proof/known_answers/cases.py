"""The cases: small layers and inputs from the integer hash of proof/numbers.py.

A case must never change: its answers are stored. New ground is a new case with a new name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exactmoe.bank import ExpertBank, Router
from exactmoe.config import MoEConfig, Numerics, RouterConfig
from exactmoe.dense import DenseMLP
from exactmoe.formats import BLOCK, PackedWeight
from exactmoe.layer import MoELayer
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.known_answers.ties import on_ties_dense, on_ties_experts
from exactmoe.proof.numbers import integers, permutations, units, wide, words

TOKENS = 8
VOCABULARY = 32
LIMIT = 2.5
_FACTOR = 2.5
_SOFTPLUS = "sqrt_softplus"


@dataclass(frozen=True)
class Case:
    """One layer, one batch and one entry.

    Attributes:
        name: key of its answer.
        make: (stream, backend) -> the entry and its batch.
    """

    name: str
    make: Callable[[int, str], tuple[Entry, Batch]]


@dataclass(frozen=True)
class _Layer:
    """What a MoE case is made of: formats, sizes, router, and what stands beside the experts."""

    format: str
    hidden_size: int = 64
    intermediate_size: int = 32
    num_experts: int = 8
    top_k: int = 3
    numerics: Numerics | str = "a16"
    score: str = "sigmoid"
    normalize: bool = True
    router_dtype: torch.dtype = torch.bfloat16
    hashed: bool = False
    limit: float | None = LIMIT
    shared: bool = True
    divide: bool = False

    def build(self, stream: int, backend: str) -> MoELayer:
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.num_experts
        config = MoEConfig(hidden, inner, experts, self.top_k, self.limit, self.numerics)
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        packed = {
            name: weight(self.format, (experts, *shape), stream + place, self.divide)
            for place, (name, shape) in enumerate(shapes.items(), start=10)
        }
        shared = None
        if self.shared:
            parts = dense("bf16", (hidden, inner), self.limit, stream + 20)
            shared = DenseMLP(**parts, backend=backend)
        router = self.router(stream + 30)
        bank = ExpertBank(packed["gate"], packed["up"], packed["down"])
        return MoELayer(config, bank, router, shared, backend=backend)

    def router(self, stream: int) -> Router:
        experts = self.num_experts
        matrix = wide((experts, self.hidden_size), stream) / 16.0
        bias, table = None, None
        if self.hashed:
            table = permutations(VOCABULARY, experts, stream + 1)[:, : self.top_k].contiguous()
        else:
            bias = units((experts,), stream + 1)
        config = RouterConfig(self.score, factor=_FACTOR, normalize=self.normalize)
        return Router(matrix.to(self.router_dtype), bias=bias, table=table, config=config)


def weight(
    format: str, shape: tuple[int, int, int], stream: int, divide: bool = False
) -> PackedWeight:
    """A weight [E, N, K] of random codes and legal scales, values near 1 / sqrt(K)."""
    experts, rows, columns = shape
    if format == "bf16":
        return PackedWeight("bf16", (wide(shape, stream) / columns**0.5).bfloat16())
    if format == "fp8":
        return _fp8(shape, stream)
    codes = (words((experts, rows, columns // 2), stream) & 0xFF).to(torch.uint8)
    blocks = (experts, rows, columns // BLOCK[format])
    if format == "mxfp4":
        # Exponents -9 ... -2: within the 14 binades of fp8 units.
        scales = integers(blocks, stream + 1000, 127 - 9, 127 - 2).to(torch.uint8)
        return PackedWeight("mxfp4", codes, scales)
    # E4M3 2^-6 ... 3.75, every mantissa; global scales that are no powers of two.
    scales = integers(blocks, stream + 1000, 0x08, 0x47).to(torch.uint8)
    global_scale = (0.5 + units((experts,), stream + 2000)) / 32.0
    if divide:
        global_scale = 32.0 * (0.5 + units((experts,), stream + 2000))
    return PackedWeight("nvfp4", codes, scales, global_scale, "divide" if divide else "multiply")


def _fp8(shape: tuple[int, int, int], stream: int) -> PackedWeight:
    """Every code but the two NaN (they become 448), scales that are no powers of two."""
    experts, rows, columns = shape
    codes = words(shape, stream) & 0xFF
    codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes).to(torch.uint8)
    blocks = (experts, -(-rows // BLOCK["fp8"]), -(-columns // BLOCK["fp8"]))
    # The codes' root mean square is near 113.
    scales = (0.5 + units(blocks, stream + 1000)) / (113.0 * columns**0.5)
    return PackedWeight("fp8", codes, scales)


def dense(format: str, sizes: tuple[int, int], limit: float | None, stream: int) -> dict[str, Any]:
    """Arguments of a DenseMLP [H] -> [I] -> [H]: gate, up, down, swiglu_limit."""
    hidden, inner = sizes
    gate, up = (weight(format, (1, inner, hidden), stream + place) for place in range(2))
    down = weight(format, (1, hidden, inner), stream + 2)
    return {"gate": gate, "up": up, "down": down, "swiglu_limit": limit}


def _rows(x: Tensor) -> Tensor:
    """The last rows become special: zeros and a -0, large, so small that h is subnormal, a NaN."""
    x = x.clone()
    x[-4] = 0.0
    x[-4, 1] = -0.0
    x[-3] *= 64.0
    x[-2] *= 2.0**-63
    x[-1, 7] = float("nan")
    return x


def _block(layer: _Layer) -> Callable[[int, str], tuple[Entry, Batch]]:
    def make(stream: int, backend: str) -> tuple[Entry, Batch]:
        x = _rows(wide((TOKENS, layer.hidden_size), stream + 1).bfloat16())
        ids = integers((TOKENS,), stream + 2, 0, VOCABULARY - 1) if layer.hashed else None
        return Entry("block", layer.build(stream, backend)), Batch(x, token_ids=ids)

    return make


def _experts(layer: _Layer) -> Callable[[int, str], tuple[Entry, Batch]]:
    """Routed experts only: an id twice, absent ids, a row without experts, a negative weight."""

    def make(stream: int, backend: str) -> tuple[Entry, Batch]:
        x = _rows(wide((TOKENS, layer.hidden_size), stream + 1).bfloat16())
        shape = (TOKENS, layer.top_k)
        ids = permutations(TOKENS, layer.num_experts, stream + 2)[:, : layer.top_k].int()
        weights = units(shape, stream + 3)
        ids[0, 1] = ids[0, 0]
        ids[1, 0] = -1
        ids[2] = -1
        weights[0, 2] = -weights[0, 2]
        weights[1, 1] = 0.0
        batch = Batch(x, expert_ids=ids.contiguous(), weights=weights)
        return Entry("experts", replace(layer, shared=False).build(stream, backend)), batch

    return make


def _dense(
    format: str, hidden: int, inner: int, output: str
) -> Callable[[int, str], tuple[Entry, Batch]]:
    def make(stream: int, backend: str) -> tuple[Entry, Batch]:
        x = _rows(wide((TOKENS, hidden), stream + 1).bfloat16())
        parts = dense(format, (hidden, inner), LIMIT, stream + 10)
        return Entry("dense", DenseMLP(**parts, backend=backend, output=output)), Batch(x)

    return make


_F32 = Numerics(slot="f32", output="f32")
_A8 = Numerics(activation="a8", units="auto", slot="f32")


def _a8(format: str, **fields: Any) -> _Layer:
    given = {"numerics": replace(_A8, output="f32"), **fields}
    return _Layer(format, hidden_size=128, intermediate_size=128, **given)


# Most outputs are f32: rounding to bf16 hides the order of a sum.
CASES = (
    Case("a16 nvfp4 sigmoid shared limit", _block(_Layer("nvfp4", numerics=_F32))),
    Case("a16 nvfp4 bf16 slot and output", _block(_Layer("nvfp4"))),
    Case(
        "a16 nvfp4 divided, sizes 96 and 48",
        _block(_Layer("nvfp4", 96, 48, divide=True, numerics=_F32)),
    ),
    Case(
        "a16 mxfp4 sqrt_softplus, 11 experts",
        _block(_Layer("mxfp4", num_experts=11, score=_SOFTPLUS, numerics=_F32)),
    ),
    Case(
        "a16 bf16 experts, f32 router",
        _block(_Layer("bf16", router_dtype=torch.float32, numerics=_F32)),
    ),
    Case("a16 nvfp4 no limit, no shared", _block(_Layer("nvfp4", limit=None, shared=False))),
    Case("a16 nvfp4 not normalised", _block(_Layer("nvfp4", normalize=False, numerics=_F32))),
    Case("a16 nvfp4 bf16 ladder", _block(_Layer("nvfp4", numerics=Numerics(router="bf16_ladder")))),
    Case("a16 mxfp4 hash", _block(_Layer("mxfp4", hashed=True, score=_SOFTPLUS, numerics=_F32))),
    Case("a16 nvfp4 experts only", _experts(_Layer("nvfp4", top_k=6, numerics=_F32))),
    Case("a8 mxfp4 sqrt_softplus shared limit", _block(_a8("mxfp4", score=_SOFTPLUS))),
    Case(
        "a8 mxfp4 hash, bf16 output",
        _block(_a8("mxfp4", hashed=True, score=_SOFTPLUS, numerics=_A8)),
    ),
    Case("a8 nvfp4 sigmoid", _block(_a8("nvfp4"))),
    Case("a8 mxfp4 experts only", _experts(_a8("mxfp4", top_k=6))),
    Case("dense bf16, two segments", _dense("bf16", 16, 4112, "f32")),
    Case("dense nvfp4", _dense("nvfp4", 64, 96, "bf16")),
    Case("a16 silu on the ties of bf16", on_ties_experts),
    Case("dense silu on the ties of bf16", on_ties_dense),
    Case("a16 fp8 sigmoid shared limit", _block(_Layer("fp8", 144, 272, numerics=_F32))),
    Case("a16 fp8 experts only", _experts(_Layer("fp8", 272, 144, top_k=6, numerics=_F32))),
    Case("dense fp8, two segments", _dense("fp8", 144, 4368, "f32")),
    Case("dense nvfp4, two segments", _dense("nvfp4", 16, 4112, "f32")),
    Case("dense mxfp4, two segments", _dense("mxfp4", 32, 4128, "f32")),
    # Multiples of 128: the sizes that a path with a layout of its own takes.
    Case(
        "a16 nvfp4 sigmoid shared limit, sizes 256 and 384",
        _block(_Layer("nvfp4", 256, 384, num_experts=16, top_k=4, numerics=_F32)),
    ),
    Case(
        "a16 mxfp4 sqrt_softplus, sizes 128 and 256",
        _block(_Layer("mxfp4", 128, 256, score=_SOFTPLUS, numerics=_F32)),
    ),
    Case(
        "a16 nvfp4 divided experts only, sizes 128 and 256",
        _experts(_Layer("nvfp4", 128, 256, top_k=6, divide=True)),
    ),
)
