"""Synthetic checkpoints of any size: random codes under legal scales, written as fast as a disk.

Bytes come from one pool of random ones, so an 8 GiB checkpoint takes the time of writing 8 GiB.
`python tests/helpers/synthetic_checkpoints.py OUT --family glm5_next --dialect modelopt --gib 8`
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_maker import deepseek_config, glm_config
from exactmoe.checkpoint.dialects import (
    COMPRESSED_TENSORS_MXFP4,
    COMPRESSED_TENSORS_NVFP4,
    DEEPSEEK_MXFP4,
    FP8_DIALECTS,
    MODELOPT_NVFP4,
    PLAIN_BF16,
    STACKED_BF16,
    STACKED_MXFP4,
    STACKED_NVFP4,
    Dialect,
    Part,
)
from exactmoe.checkpoint.rewrite.files import Entry, ShardWriter, write_json
from exactmoe.families import PROJECTIONS, STACKED_PROJECTIONS, LayerSpec, family_of

DIALECTS = {
    "bf16": PLAIN_BF16,
    "fp8": FP8_DIALECTS[0],
    "modelopt": MODELOPT_NVFP4,
    "compressed-tensors": COMPRESSED_TENSORS_NVFP4,
    "compressed-tensors-mxfp4": COMPRESSED_TENSORS_MXFP4,
    "deepseek": DEEPSEEK_MXFP4,
    "stacked-bf16": STACKED_BF16,
    "stacked-nvfp4": STACKED_NVFP4,
    "stacked-mxfp4": STACKED_MXFP4,
}
FAMILIES = ("glm5_next", "deepseek_v4")
_STACKED = (STACKED_BF16, STACKED_NVFP4, STACKED_MXFP4)
_POOL = 2**22


@dataclass(frozen=True)
class Synthetic:
    """What to make. The layers are one dense and then MoE (glm5_next), or all MoE (deepseek_v4).

    Attributes:
        family: "glm5_next" or "deepseek_v4".
        dialect: of the routed experts, a key of DIALECTS; shared and dense parts are BF16.
        hidden_size, intermediate_size, num_experts, num_layers: geometry; top_k is 2.
        shards: files.
        seed: of the bytes.
        spread: MXFP4 exponents lie in so many binades; NVFP4 scales are powers of two where it is
            not None, so that casts are exact.
    """

    family: str = "glm5_next"
    dialect: str = "modelopt"
    hidden_size: int = 128
    intermediate_size: int = 128
    num_experts: int = 4
    num_layers: int = 2
    shards: int = 2
    seed: int = 0
    spread: int | None = 12

    def config(self) -> dict[str, Any]:
        """config.json."""
        changes = {
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.intermediate_size,
            "n_routed_experts": self.num_experts,
            "num_hidden_layers": self.num_layers,
        }
        if self.family == "glm5_next":
            kinds = ["dense"] + ["sparse"] * (self.num_layers - 1)
            size = 2 * self.intermediate_size
            return glm_config(**changes, mlp_layer_types=kinds, intermediate_size=size)
        kinds = ["hash_moe"] + ["moe"] * (self.num_layers - 1)
        return deepseek_config(**changes, mlp_layer_types=kinds)


def sized(synthetic: Synthetic, gib: float) -> Synthetic:
    """The same with 40 experts of GLM's size a layer, and as many layers as make `gib` GiB."""
    wide = replace(synthetic, hidden_size=4096, intermediate_size=2048, num_experts=40)
    layer = sum(entry.nbytes for entry, _ in _experts(wide, _specs(wide)[-1]))
    layers = max(2, round(gib * 2**30 / layer) + (wide.family == "glm5_next"))
    return replace(wide, num_layers=layers, shards=max(2, round(gib)))


def write_synthetic(
    path: Path,
    synthetic: Synthetic,
    others: Iterable[tuple[Entry, str]] = (),
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes the folder; one shard's tensors at a time, each from a pool of random bytes.

    others: tensors beside the MLP blocks, with the kind of their bytes; config: with its geometry.
    """
    path.mkdir(parents=True, exist_ok=True)
    items = [*_items(synthetic), *others]
    weight_map: dict[str, str] = {}
    per_shard = -(-len(items) // synthetic.shards)
    pool = _Pool(synthetic)
    for number in range(synthetic.shards):
        file = f"model-{number + 1:05}-of-{synthetic.shards:05}.safetensors"
        part = items[number * per_shard : (number + 1) * per_shard]
        with ShardWriter(path / file, [entry for entry, _ in part]) as writer:
            for entry, kind in part:
                begin = 0
                for chunk in pool.chunks(kind, entry.nbytes):
                    writer.write(entry.name, chunk.numpy(), begin)
                    begin += chunk.numel()
                weight_map[entry.name] = file
    write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    (path / "config.json").write_text(json.dumps(config or synthetic.config()))
    return path


class _Pool:
    """Random bytes of each kind, given out again and again from changing places."""

    def __init__(self, synthetic: Synthetic) -> None:
        rng = torch.Generator().manual_seed(synthetic.seed)
        self._at = 0

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (_POOL,), generator=rng).to(torch.uint8)

        spread = synthetic.spread
        normal = torch.randn(_POOL // 4, generator=rng) * 0.05
        e4m3 = torch.pow(2.0, torch.randint(-6, 9, (_POOL,), generator=rng).float())
        self._kinds = {
            "codes": draw(0, 256),
            "fp8": draw(0, 127),
            "e8m0": draw(115, 116 + (20 if spread is None else spread)),
            "e4m3": draw(8, 127) if spread is None else _raw(e4m3.to(torch.float8_e4m3fn)),
            "bf16": _raw(normal.bfloat16()),
            "scale": _raw(torch.rand(_POOL // 4, generator=rng) * 0.01 + 1e-3),
            "power": _raw(torch.full((_POOL // 4,), 2.0**-9)),
            "ids": _raw(torch.randint(0, synthetic.num_experts, (_POOL // 8,), generator=rng)),
        }
        if spread is not None and DIALECTS[synthetic.dialect].format == "nvfp4":
            # Pairs of blocks with one scale, as a cast from MXFP4 leaves them.
            self._kinds["e4m3"] = self._kinds["e4m3"][: _POOL // 2].repeat_interleave(2)
        self._scale = "scale" if spread is None else "power"

    def chunks(self, kind: str, nbytes: int) -> Iterator[Tensor]:
        pool = self._kinds[self._scale if kind == "global" else kind]
        while nbytes:
            start = self._at % (pool.numel() // 2)
            chunk = pool[start : start + nbytes]
            # 8: so that the next tensor starts at a whole value.
            self._at += 8 * (chunk.numel() // 24 + 1)
            nbytes -= chunk.numel()
            yield chunk


def _raw(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _specs(synthetic: Synthetic) -> tuple[LayerSpec, ...]:
    return family_of(synthetic.config()).layers


def _items(synthetic: Synthetic) -> Iterator[tuple[Entry, str]]:
    """Every tensor of the checkpoint and the kind of its bytes."""
    specs, hidden = _specs(synthetic), synthetic.hidden_size
    for spec in specs:
        names, size = spec.names, spec.shared_size or spec.intermediate_size
        if spec.moe is not None:
            yield from _experts(synthetic, spec)
            yield Entry(str(names.router_weight), "BF16", (synthetic.num_experts, hidden)), "bf16"
            if names.router_bias is not None:
                yield Entry(names.router_bias, "F32", (synthetic.num_experts,)), "scale"
            if names.router_table is not None:
                shape = (spec.vocab_size or 0, spec.moe.top_k)
                yield Entry(names.router_table, "I64", shape), "ids"
        for name in PROJECTIONS:
            base = names.dense(name) if spec.moe is None else names.shared(name)
            shape = (hidden, size) if name == "down" else (size, hidden)
            yield Entry(f"{base}.weight", "BF16", shape), "bf16"


def _experts(synthetic: Synthetic, spec: LayerSpec) -> Iterator[tuple[Entry, str]]:
    dialect, experts = DIALECTS[synthetic.dialect], synthetic.num_experts
    shapes = {
        name: (spec.hidden_size, spec.intermediate_size)[:: 1 if name == "down" else -1]
        for name in PROJECTIONS
    }
    if dialect in _STACKED:
        for word, projections in STACKED_PROJECTIONS.items():
            rows, columns = shapes[projections[0]]
            for part in dialect.parts:
                shape = part.shape(rows * len(projections), columns) or (len(projections),)
                name = spec.names.stacked(word) + part.suffix
                yield Entry(name, part.dtypes[0], (experts, *shape)), _kind(dialect, part)
        return
    for expert in range(experts):
        for name, (rows, columns) in shapes.items():
            base = spec.names.expert(expert, name)
            for part in dialect.parts:
                scalar = (1,) if dialect.global_scale_op == "divide" else ()
                shape = part.shape(rows, columns) or scalar
                yield Entry(base + part.suffix, part.dtypes[0], shape), _kind(dialect, part)


def _kind(dialect: Dialect, part: Part) -> str:
    kinds = {"bf16": "bf16", "fp8": "fp8"}
    if part.field == "codes":
        return kinds.get(dialect.format, "codes")
    if part.field == "global_scale":
        return "global"
    return {"nvfp4": "e4m3", "mxfp4": "e8m0", "fp8": "scale"}[dialect.format]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="glm5_next")
    parser.add_argument("--dialect", choices=tuple(DIALECTS), default="modelopt")
    parser.add_argument("--gib", type=float, default=8.0)
    given = parser.parse_args()
    write_synthetic(given.out, sized(Synthetic(given.family, given.dialect), given.gib))


if __name__ == "__main__":
    main()
