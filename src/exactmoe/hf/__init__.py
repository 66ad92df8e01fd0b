"""Hugging Face transformers: load_model, whole blocks, and `experts_implementation="exactmoe"`.

Importing this package registers the name, so that
`AutoModelForCausalLM.from_pretrained(path, experts_implementation="exactmoe")` works on a bfloat16
model, and so does `quantization_config=ExactMoEConfig("nvfp4")`, which packs its experts at load,
and `DistributedConfig(..., ep_implementation="exactmoe")`, which cuts experts over ranks.
"""

from exactmoe.hf import expert_parallel, experts
from exactmoe.hf.explanation import explain
from exactmoe.hf.linears import linears
from exactmoe.hf.load import load_model
from exactmoe.hf.on_the_fly import ExactMoEConfig
from exactmoe.hf.whole_block import blocks, to_canonical
from exactmoe.hf.writing import save_model

experts.register()
expert_parallel.register()

__all__ = [
    "ExactMoEConfig",
    "blocks",
    "explain",
    "linears",
    "load_model",
    "save_model",
    "to_canonical",
]
