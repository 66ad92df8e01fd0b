"""Which of the two contracts runs where in a model, by which path, and why."""

import re

from torch import nn

from exactmoe.dense import DenseMLP
from exactmoe.hf import experts, storage
from exactmoe.hf.linears import linears
from exactmoe.hf.whole_block import blocks


def explain(model: nn.Module, width: int = 8) -> str:
    """Text, a paragraph for each MLP block or experts module that runs here, and one for the linear
    layers outside of them.

    Args:
        model: a transformers model.
        width: tokens of the call that the text describes.
    """
    parts = []
    replaced = blocks(model)
    inside = {id(part) for _, block, _ in replaced for part in block.modules()}
    for index, block, layer in replaced:
        what = (
            "dense MLP" if isinstance(layer, DenseMLP) else "router, routed experts, shared expert"
        )
        head = (
            f"layer {index}, {type(block).__name__}: whole block ({what}), one rounding at the end"
        )
        parts.append(f"{head}\n{layer.explain(width)}")
    for name, module in experts.modules(model):
        if id(module) not in inside:
            parts.append(
                f"{name}, {type(module).__name__}: routed experts only "
                f"(experts_implementation={experts.NAME!r}), {storage.format_of(module)}, class "
                f"{experts.numerics_of(module).activation}, rounded to bfloat16 before the model "
                "adds its shared expert"
            )
    parts += _linears(model)
    return "\n".join(parts) or "no MLP block of this model runs here"


def _linears(model: nn.Module) -> list[str]:
    """A line for each kind of linear layer, with the decoder layers that have it."""
    found = linears(model)
    if not found:
        return []
    kinds: dict[str, list[int]] = {}
    for name, _, layer in found:
        place = re.search(r"\blayers\.(\d+)\.(.+)$", name)
        rows, columns = layer.weight.rows * layer.groups, layer.weight.columns
        kind = f"{place[2] if place else name}: {layer.weight.format} [{rows}, {columns}]"
        kind += f" in {layer.groups} groups" if layer.groups > 1 else ""
        kinds.setdefault(kind, []).extend([int(place[1])] if place else [])
    head = (
        f"{len(found)} linear layers outside the MLP blocks: bf16 activations, one rounding at the "
        f"end\n{found[0][2].plan()}"
    )
    lines = [f"  {_ranges(layers)}{kind}" for kind, layers in kinds.items()]
    return ["\n".join([head, *lines])]


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0-2, 5, "."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"layers {', '.join(texts)}, " if texts else ""
