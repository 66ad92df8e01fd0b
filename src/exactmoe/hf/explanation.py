"""Which of the two contracts runs where in a model, by which path, and why."""

from torch import nn

from exactmoe.dense import DenseMLP
from exactmoe.hf import experts, storage
from exactmoe.hf.whole_block import blocks


def explain(model: nn.Module, width: int = 8) -> str:
    """Text, a paragraph for each MLP block or experts module that runs here.

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
                f"{experts.numerics_of(module)}, rounded to bfloat16 before the model adds its "
                "shared expert"
            )
    return "\n".join(parts) or "no MLP block of this model runs here"
