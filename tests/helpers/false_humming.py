"""humming-kernels as this package uses it, in float32 on a CPU: what its kernels promise.

An indexed product reads row sorted_ids[i] // top_k of its input for the expert of block
i // block rows and writes row sorted_ids[i]; entries that are not below the number of slots are
padding. A grouped one takes rows that are sorted, and where each expert's begin.
"""

import json
import sys
from types import ModuleType, SimpleNamespace

import torch

from exactmoe.formats import PackedWeight, dequantize

TILE_ROWS = {"few": 8, "many": 16}


class HummingLayer:
    def __init__(self, shape_n, shape_k, weight_config, input_config, num_experts, torch_dtype):
        assert torch_dtype == torch.bfloat16
        self.shape = (num_experts, shape_n, shape_k)
        self.format = "mxfp4" if weight_config == {"quant_method": "mxfp4"} else "nvfp4"
        assert input_config in (None, {"dtype": "float8e4m3", "group_size": 128})
        self.fp8 = input_config is not None
        self.humming_config = SimpleNamespace(to_str=lambda: str(self.shape))

    def load_from_tensors(self, tensors):
        scales = tensors["weight_scale"].view(torch.uint8)
        factor = tensors.get("weight_scale_2")
        packed = PackedWeight(self.format, tensors["weight"], scales, factor)
        self.dense = dequantize(packed).float()
        assert self.dense.shape == self.shape

    def transform(self):
        self.weight = self.dense

    def __call__(self, inputs, outputs, valid_shape_m, compute_config, tuning_config, **routing):
        compute = json.loads(compute_config)
        key = (str(self.shape), compute_config, tuning_config)
        assert key in HummingKernel.compiled, "this was not compiled before"
        (config,) = [c for a, b, c in json.loads(tuning_config) if a < valid_shape_m <= b]
        assert outputs.shape == (valid_shape_m, self.shape[1])
        assert (inputs.dtype == torch.float8_e4m3fn) == (routing.get("input_scale") is not None)
        rows = inputs.float()
        if routing.get("input_scale") is not None:
            rows = rows * routing["input_scale"].repeat_interleave(128, -1)[:, : rows.shape[1]]
        outputs.fill_(float("nan"))
        if compute["gemm_type"] == "indexed":
            self.indexed(rows, outputs, config["block_shape"][0], **routing)
        else:
            self.grouped(rows, outputs, **routing)

    def indexed(self, rows, outputs, height, *, sorted_ids, expert_ids, top_k, **others):
        total = int(others["num_tokens_padded"])
        assert total % height == 0 and sorted_ids.dtype == expert_ids.dtype == torch.int32
        for block in range(total // height):
            ids = sorted_ids[block * height : (block + 1) * height].long()
            ids = ids[ids < outputs.shape[0]]
            weight = self.weight[int(expert_ids[block])]
            outputs[ids] = (rows[ids // top_k] @ weight.T).to(outputs.dtype)

    def grouped(self, rows, outputs, *, expert_layout, **others):
        for expert, (start, end) in enumerate(zip(expert_layout, expert_layout[1:], strict=False)):
            part = rows[start:end] @ self.weight[expert].T
            outputs[start:end] = part.to(outputs.dtype)


class HummingMethod:
    @staticmethod
    def may_process_input(layer, inputs, *, activation_type, activation_impl):
        assert activation_type == "binary_split"
        gate, up = inputs.float().chunk(2, -1)
        names = {"fminf": torch.fmin, "fmaxf": torch.fmax, "__expf": torch.exp, "a": gate, "b": up}
        code = activation_impl.replace("10.0f", "torch.tensor(10.0)").replace("1.0f", "1.0")
        h = eval(code, {"torch": torch}, names)
        if not layer.fp8:
            return h.bfloat16(), None, None
        groups = h.unflatten(-1, (-1, 128))
        scales = groups.abs().amax(-1) / 448
        codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        return codes, scales, None


class HummingKernel:
    compiled: set = set()

    @classmethod
    def prepare_kernels(cls, layer_config, compute_config, tuning_config, device):
        cls.compiled.add((layer_config, compute_config, tuning_config))


def get_heuristics_config(layer, shape_m, use_batch_invariant, gemm_type, device):
    height = TILE_ROWS["few" if shape_m <= 16 else "many"]
    return {"block_shape": (height, 128, 64), "use_stream_k": not use_batch_invariant}


def install(monkeypatch):
    """`import humming` finds this, until the test ends."""
    modules = {
        "humming": {},
        "humming.layer": {"HummingLayer": HummingLayer, "HummingMethod": HummingMethod},
        "humming.tune": {"get_heuristics_config": get_heuristics_config},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": HummingKernel},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    HummingKernel.compiled.clear()
