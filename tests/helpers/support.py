"""What runs, found by trying: a part of a model, stored in a dialect, in a checkpoint of a family.

The checkpoints are the demo models' configs with two layers and random weights; one part lies in
the dialect, all else in bf16. `outcome` loads and runs the part and compares it with float64.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_layouts import DEEPSEEK_WORDS, GLM_WORDS, same_bytes, truth
from checkpoint_maker import Tensors, write
from exactmoe import DenseMLP, MoELayer, load_layer
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.hf import adapter, blocks, load_model
from layers import relative_l2
from storages import STORAGES, Storage

DEMO = Path(__file__).parents[2] / "demo"
PARTS = ("routed experts", "shared expert", "dense MLP", "MTP layer", "router")
# Words of the refusals -> what the table says. A message with none of them is no known refusal.
REASONS = {
    "unknown layout": "the layout is unknown",
    "is missing, and all of": "only routed experts are stacked",
    "is missing (router weight)": "a router is BF16 or F32",
    "expected BF16 or F32": "a router is BF16 or F32",
    "not run: its rows of gate and up are interleaved": "interleaved rows and biases, not run",
    "FP8 experts run in class a16 only": "FP8 experts run in class `a16` only",
}
NO_MTP = "transformers builds no MTP layer, `load_model` leaves it out"
EXPERTS, TOP_K, TOKENS, VOCABULARY = 4, 2, 5, 32
MTP_LAYER = 2

Layer = MoELayer | DenseMLP


@dataclass(frozen=True)
class Outcome:
    """How far a cell gets: "yes", "in a16", "load_layer", "load_layer in a16", "no"; and why not
    further.
    """

    word: str
    reason: str = ""


@dataclass(frozen=True)
class ModelFamily:
    """Where the parts lie in a checkpoint of a family; `dense` is None where it has none."""

    words: Mapping[str, str]
    moe: str
    mtp: str
    dense: str | None = None

    def block(self, part: str) -> tuple[str, int] | None:
        """Name of the block that holds a part, and its layer."""
        if part == "dense MLP":
            return None if self.dense is None else (self.dense, 0)
        return (self.mtp, MTP_LAYER) if part == "MTP layer" else (self.moe, 1)


_GLM = "model.language_model.layers"
FAMILIES = {
    "glm5_next": ModelFamily(GLM_WORDS, f"{_GLM}.1.mlp", f"{_GLM}.2.mlp", f"{_GLM}.0.mlp"),
    "deepseek_v4": ModelFamily(DEEPSEEK_WORDS, "model.layers.1.ffn", "model.mtp.0.ffn"),
}


@cache
def small_model(family: str) -> tuple[dict[str, Any], Tensors]:
    """Config and bf16 tensors of a model of two layers, and of an MTP layer like the last one."""
    config = json.loads((DEMO / family / "config.json").read_text())
    del config["quantization_config"]
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 2, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    text |= {"vocab_size": VOCABULARY}
    for name in {"layer_types", "mlp_layer_types", "indexer_types"} & set(text):
        text[name] = text[name][:2]
    torch.manual_seed(7)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        config_class = adapter.read_config(folder)
        model = adapter.auto_class(config_class).from_config(config_class, dtype=torch.bfloat16)
        with adapter.progress_bars(False):
            model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            tensors[name] = torch.randint(EXPERTS, tensor.shape)
        elif name.endswith((".gate.bias", ".e_score_correction_bias")):
            tensors[name] = 0.1 * torch.randn(tensor.shape)
    moe, mtp = FAMILIES[family].moe, FAMILIES[family].mtp
    copies = {n.replace(moe, mtp): t for n, t in tensors.items() if n.startswith(f"{moe}.")}
    return config, tensors | copies


def _groups(names: ModelFamily, part: str, block: str) -> dict[str, list[list[str]]]:
    """Stacked name -> per expert, the projections in it: whole names without the last part."""
    if part == "router":
        return {f"{block}.gate": [[f"{block}.gate"]]}
    prefixes = [f"{block}.experts.{expert}." for expert in range(EXPERTS)]
    owner = f"{block}.experts."
    if part in ("shared expert", "dense MLP"):
        owner = f"{block}.shared_experts." if part == "shared expert" else f"{block}."
        prefixes = [owner]
    grouped = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
    return {
        owner + word: [[prefix + names.words[p] for p in projections] for prefix in prefixes]
        for word, projections in grouped.items()
    }


def _stack(
    tensors: Tensors, name: str, bases: list[list[str]], suffixes: Mapping[str, str]
) -> None:
    """Replaces the tensors of a group by stacked ones."""
    for old, new in suffixes.items():
        rows = [[tensors.pop(base + old) for base in row] for row in bases]
        dtype = rows[0][0].dtype
        kind = torch.uint8 if dtype.itemsize == 1 else dtype
        joined = [torch.cat([t.view(kind).reshape(t.shape or (1,)) for t in row]) for row in rows]
        tensors[name + new] = torch.stack(joined).view(dtype)


def _stored(
    storage: Storage, names: ModelFamily, part: str, block: str, tensors: Tensors
) -> dict[str, Tensor]:
    """Stores a part of `tensors` in a dialect; its true values, one entry per projection."""
    values: dict[str, list[Tensor]] = {}
    for name, bases in _groups(names, part, block).items():
        for base in (base for row in bases for base in row):
            made = storage.store(base, tensors.pop(f"{base}.weight"))
            values.setdefault(base.rpartition(".")[2], []).append(storage.values(made, base))
            tensors |= made
        _stack(tensors, name, bases, storage.stacked)
    return {word: torch.stack(found) for word, found in values.items()}


def outcome(dialect: str, part: str, family: str, folder: Path) -> Outcome | None:
    """Writes, loads, runs and compares one cell; None where the family has no such part.

    Raises AssertionError for wrong values or bits, for a refusal without the tensor's name or a
    known reason, and where load_model takes what load_layer refuses.
    """
    names = FAMILIES[family]
    place = names.block(part)
    if place is None:
        return None
    block, index = place
    config, original = small_model(family)
    tensors = dict(original)
    values = _stored(STORAGES[dialect], names, part, block, tensors)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, config, tensors)
    layer, refusal = _layer(folder, index, block, partial(_compare, part, names, values))
    try:
        model = load_model(folder, progress=False)
    except (CheckpointError, Unsupported) as error:
        assert part != "MTP layer", f"a model leaves MTP layers out, but: {error}"
        if refusal is None or refusal.word != "load_layer in a16":
            return refusal or Outcome("load_layer", _reason(error, block))
        layer = load_layer(folder, index, numerics="a16")
        model = load_model(folder, numerics="a16", progress=False)
        refusal = Outcome("in a16", refusal.reason)
    modules = {number: module for number, module, _ in blocks(model)}
    if part == "MTP layer":
        assert sorted(modules) == [0, 1]
        return refusal or Outcome("load_layer", NO_MTP)
    assert layer is not None, f"load_model took {block} in {dialect}, which load_layer refuses"
    x = _x(layer)
    assert same_bytes(modules[index](x[None])[0], layer(x)), f"{dialect}, {part}, {family}"
    return refusal or Outcome("yes")


def _layer(
    folder: Path, index: int, block: str, compare: Callable[[Layer, float], None]
) -> tuple[Layer | None, Outcome | None]:
    """The layer in the family's class, compared with the truth; else how far it gets."""
    try:
        exact = load_layer(folder, index, numerics="a16")
    except (CheckpointError, Unsupported) as error:
        return None, Outcome("no", _reason(error, block))
    compare(exact, 2.0**-7)
    try:
        layer = load_layer(folder, index)
    except Unsupported as error:
        return None, Outcome("load_layer in a16", _reason(error, "fp8"))
    # Class a8 rounds activations to E4M3, which has 3 bits of mantissa.
    compare(layer, 2.0**-7 if layer.numerics.activation == "a16" else 2.0**-4)
    return layer, None


def _reason(error: Exception, name: str) -> str:
    """What the table says of a refusal."""
    message = str(error)
    assert name in message, f"{name} is not named in: {message}"
    known = [reason for words, reason in REASONS.items() if words in message]
    assert known, f"no known refusal: {message}"
    return known[0]


def _x(layer: Layer) -> Tensor:
    rng = torch.Generator().manual_seed(11)
    return torch.randn(TOKENS, layer.bank.hidden_size, generator=rng).bfloat16()


def _compare(
    part: str,
    names: ModelFamily,
    values: Mapping[str, Tensor],
    layer: Layer,
    tolerance: float,
) -> None:
    """Runs the block, and compares the part in question with float64."""
    x = _x(layer)
    assert torch.isfinite(layer(x)).all()
    if part == "router":
        assert isinstance(layer, MoELayer)
        _compare_router(layer, x, values["gate"][0])
        return
    ids, weights = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1)
    if part in ("routed experts", "MTP layer"):
        assert isinstance(layer, MoELayer)
        ids, weights = layer.route(x)
        found = layer.experts(x, ids, weights)
    else:
        dense = layer.shared if isinstance(layer, MoELayer) else layer
        assert dense is not None
        found = dense(x)
    by_projection = {projection: values[word] for projection, word in names.words.items()}
    error = relative_l2(found, truth(x, ids, weights, by_projection, 10.0))
    assert error < tolerance, f"{part}: relative error {error}, allowed {tolerance}"


def _compare_router(layer: MoELayer, x: Tensor, weight: Tensor) -> None:
    router = layer.router
    assert router is not None and router.bias is not None
    logits = x.double() @ weight.T
    sigmoid = router.config.score == "sigmoid"
    scores = logits.sigmoid() if sigmoid else torch.nn.functional.softplus(logits).sqrt()
    right = (scores + router.bias.double()).topk(TOP_K).indices.sort().values
    ids, weights = layer.route(x)
    order = ids.sort().indices
    assert ids.sort().values.tolist() == right.tolist()
    chosen = scores.gather(1, right)
    expected = router.config.factor * chosen / chosen.sum(1, keepdim=True)
    assert relative_l2(weights.gather(1, order), expected) < 2.0**-20
