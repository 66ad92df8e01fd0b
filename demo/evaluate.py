"""Held-out perplexity, tokenizable continuations and load per expert of a demo checkpoint.

`python demo/evaluate.py demo/glm5_next --variants dequantised a16` prints one JSON object a
variant, the transformers variants with the router gate in f32:

    original      the bf16 original of `--original`, run by transformers
    dequantised   the packed checkpoint, its experts dequantised to bf16, run by transformers
    a16, a8       the packed checkpoint, run by exactmoe in this numerics class
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from continuations import continue_greedily, prompts, tally
from corpus import encode_documents, heldout_texts
from export import COPIED_FILES, tensors
from models import FAMILIES, load_original, routers, run_in_f32
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import exactmoe
from exactmoe.formats import PackedWeight, dequantize

WINDOW = 512
VARIANTS = ("original", "dequantised", "a16", "a8")


def unpack(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """bf16 tensor of a stored tensor: dequantised where it is packed; None for a scale."""
    if (
        name.endswith((".weight_scale", ".weight_scale_2"))
        or name.endswith(".scale")
        and ".experts." in name
    ):
        return None
    weight = stored[name]
    if weight.dtype == torch.uint8:
        scales, scale_2 = stored[f"{name}_scale"].view(torch.uint8), stored[f"{name}_scale_2"]
        packed = PackedWeight("nvfp4", weight[None], scales[None], scale_2[None])
    elif weight.dtype == torch.int8:
        scales = stored[f"{name.removesuffix('weight')}scale"].view(torch.uint8)
        packed = PackedWeight("mxfp4", weight[None].view(torch.uint8), scales[None])
    else:
        return weight
    return dequantize(packed)[0].to(torch.bfloat16)


def load_dequantised(folder: Path) -> PreTrainedModel:
    """transformers' model of the packed checkpoint in `folder`, with bf16 experts."""
    stored = dict(tensors(folder))
    plain = {name: tensor for name in stored if (tensor := unpack(stored, name)) is not None}
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    config.pop("expert_dtype", None)
    with TemporaryDirectory() as name:
        target = Path(name)
        save_file(plain, target / "model.safetensors", {"format": "pt"})
        (target / "config.json").write_text(json.dumps(config))
        for file in COPIED_FILES:
            (target / file).write_bytes((folder / file).read_bytes())
        return load_original(target)


def with_exact_gate(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with its routers in f32, as the contract of both families asks."""
    for router in routers(model).values():
        run_in_f32(router.float())
    return model


def load(variant: str, folder: Path, original: Path | None) -> PreTrainedModel:
    """The model of one of `VARIANTS`."""
    if variant == "original":
        if original is None:
            raise SystemExit("the variant 'original' needs --original")
        return with_exact_gate(load_original(original))
    if variant == "dequantised":
        return with_exact_gate(load_dequantised(folder))
    return exactmoe.load_model(str(folder), numerics=variant)


def heldout_rows(tokenizer: PreTrainedTokenizerBase, count: int) -> torch.Tensor:
    """(count, WINDOW + 1) windows of the held-out text, spread evenly over it."""
    tokens = torch.from_numpy(
        encode_documents(tokenizer, list(heldout_texts().values())).astype("int64")
    )
    rows = tokens[: len(tokens) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    if count > len(rows):
        raise SystemExit(f"--windows is {count}; the held-out text has {len(rows)}")
    return rows[[index * len(rows) // count for index in range(count)]]


@torch.no_grad()
def perplexity(model: PreTrainedModel, rows: torch.Tensor, batch: int = 8) -> float:
    """Perplexity of the last WINDOW tokens of each row."""
    total = 0.0
    for part in rows.split(batch):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(
            logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        ).item()
    return math.exp(total / (len(rows) * WINDOW))


def count_loads(model: PreTrainedModel) -> Callable[[], dict[str, list[float]]]:
    """Count from now on; the result gives each router's load per expert over its mean."""
    counts: dict[str, torch.Tensor] = {}

    def count(name: str, router: torch.nn.Module, expert_ids: torch.Tensor) -> None:
        load = torch.bincount(expert_ids.flatten(), minlength=router.num_experts)
        counts[name] = counts.get(name, torch.zeros_like(load)) + load

    for name, router in routers(model).items():
        router.register_forward_hook(
            lambda module, _, output, name=name: count(name, module, output[2])
        )
    return lambda: {name: (load / load.float().mean()).tolist() for name, load in counts.items()}


def evaluate(variant: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Everything measured of one variant."""
    model = load(variant, arguments.folder, arguments.original)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    loads = count_loads(model)
    rows = heldout_rows(tokenizer, arguments.windows)
    result: dict[str, object] = {
        "variant": variant,
        "tokens": rows[:, 1:].numel(),
        "perplexity": round(perplexity(model, rows), 4),
    }
    # exactmoe runs a whole MLP block, so transformers' routers are called only in the other
    # variants.
    result["load"] = {
        name: {"least": round(min(load), 2), "most": round(max(load), 2)}
        for name, load in loads().items()
    }
    if arguments.continuations:
        results = continue_greedily(model, tokenizer, prompts(tokenizer))
        result["continuations"] = tally(results)
        if arguments.samples:
            arguments.samples.write_text(json.dumps(results, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help=f"packed checkpoint: {' or '.join(FAMILIES)}")
    parser.add_argument("--original", type=Path, help="bf16 original made by train.py")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["dequantised", "a16"])
    parser.add_argument(
        "--windows", type=int, default=60, help=f"held-out windows of {WINDOW} tokens"
    )
    parser.add_argument("--no-continuations", dest="continuations", action="store_false")
    parser.add_argument(
        "--samples", type=Path, help="write the continuations of the last variant here"
    )
    arguments = parser.parse_args()
    for variant in arguments.variants:
        print(json.dumps(evaluate(variant, arguments)), flush=True)


if __name__ == "__main__":
    main()
