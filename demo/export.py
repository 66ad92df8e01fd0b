"""Pack a bf16 original into the checkpoint of this folder.

`python demo/export.py --original FOLDER --out demo/glm5_next`. Routed experts become FP4 in the
layout in which the family is published; every other tensor is copied. The quantisers are the
package's own.

glm5_next: ModelOpt NVFP4, two files and an index. deepseek_v4: native int8 codes and E8M0 scales,
one file.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from exactmoe.formats import quantize_mxfp4, quantize_nvfp4

EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": [
        "lm_head",
        "model.visual*",
        "model.language_model.layers.0.mlp*",
        "model.language_model.layers.*.mlp.gate",
        "model.language_model.layers.*.mlp.shared_experts*",
        "model.language_model.layers.*.self_attn*",
    ],
}
NATIVE = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
# The published names: save_pretrained writes them after "model.", save these.
PUBLISHED = {
    "embed_tokens.weight": "embed.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a folder of safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (a safetensors handle is no dict)
                yield name, opened.get_tensor(name)


def modelopt(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stored tensors of one original tensor in ModelOpt's NVFP4 layout."""
    if not EXPERT.search(name):
        return {name: tensor}
    packed = quantize_nvfp4(tensor[None])
    return {
        name: packed.codes[0],
        f"{name}_scale": packed.scales[0].view(torch.float8_e4m3fn),
        f"{name}_scale_2": packed.global_scale[0],
    }


def native(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Stored tensors of one original tensor in DeepSeek-V4's own layout."""
    name = name.removeprefix("model.")
    name = PUBLISHED.get(name, name)
    if not EXPERT.search(name):
        return {name: tensor}
    packed = quantize_mxfp4(tensor[None])
    return {
        name: packed.codes[0].view(torch.int8),
        f"{name.removesuffix('weight')}scale": packed.scales[0].view(torch.float8_e8m0fnu),
    }


def in_two(stored: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """`stored` cut into two parts of about equal bytes, in order."""
    half = sum(tensor.nbytes for tensor in stored.values()) / 2
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    done = 0
    for name, tensor in stored.items():
        parts[done >= half][name] = tensor
        done += tensor.nbytes
    return parts


def write(stored: dict[str, torch.Tensor], folder: Path, sharded: bool) -> None:
    """Write one file, or two and their index."""
    if not sharded:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for number, part in enumerate(in_two(stored), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True) + "\n"
    )


def export(original: Path, folder: Path) -> None:
    """Pack the folder `original` into `folder`, which is emptied first."""
    config = json.loads((original / "config.json").read_text())
    is_glm = config["model_type"] == "glm5_next"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(original):
        stored |= modelopt(name, tensor) if is_glm else native(name, tensor)
    write({name: stored[name].contiguous() for name in sorted(stored)}, folder, sharded=is_glm)
    config |= (
        {"quantization_config": MODELOPT}
        if is_glm
        else {"quantization_config": NATIVE, "expert_dtype": "fp4"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in COPIED_FILES:
        shutil.copy(original / file, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--original", type=Path, required=True, help="folder made by train.py")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.original, arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size} bytes")


if __name__ == "__main__":
    main()
