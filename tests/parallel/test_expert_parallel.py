"""transformers' own expert parallel with our implementation: the bits of one process."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from exactmoe.parallel.ranks import Ranks
from layers import assert_same_bits, normal

EXPERTS, HIDDEN, INNER, TOP_K = 8, 64, 32, 3


def experts_module(family: str) -> torch.nn.Module:
    """A bfloat16 experts module with random weights, the same in every process."""
    if family == "deepseek_v4":
        from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

        config = DeepseekV4Config(
            hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS
        )
        module = DeepseekV4Experts(config)
    else:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        module = Qwen3MoeExperts(
            Qwen3MoeConfig(
                hidden_size=HIDDEN,
                moe_intermediate_size=INNER,
                num_local_experts=EXPERTS,
                num_experts=EXPERTS,
            )
        )
    rng = torch.Generator().manual_seed(71)
    for name, parameter in module.named_parameters():
        values = normal(rng, *parameter.shape, scale=0.2)
        setattr(module, name, torch.nn.Parameter(values, requires_grad=False))
    return module


def cut(module: torch.nn.Module, ranks: Ranks, implementation: str) -> torch.nn.Module:
    """As transformers' load with DistributedConfig(tp_size=R, ep_size=R) leaves it."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    mesh = DeviceMesh.from_group(ranks.group, "cpu", mesh_dim_names=("ep",))
    for name in ("gate_up_proj", "down_proj"):
        ALL_PARALLEL_STYLES["grouped_gemm"].shard_param(module, name, mesh)
    style = ALL_PARALLEL_STYLES["ep_dispatch_experts"]
    return style.install_forward(module, mesh, tp_mesh=mesh, ep_implementation=implementation)


def exact(ranks: Ranks, family: str) -> tuple[int, int]:
    from exactmoe.hf.experts import experts_forward

    rng = torch.Generator().manual_seed(72)
    whole, ours, stock = (experts_module(family) for _ in range(3))
    ours, stock = cut(ours, ranks, "exactmoe"), cut(stock, ranks, "all_reduce")
    different = 0
    for width in (1, 6, 65):
        x = normal(rng, width, HIDDEN)
        ids = torch.rand(width, EXPERTS, generator=rng).argsort(-1)[:, :TOP_K]
        weights = torch.rand(width, TOP_K, generator=rng)
        with torch.no_grad():
            expected = experts_forward(whole, x, ids, weights)
            assert_same_bits(ours(x, ids, weights), expected, f"{family} {width}")
            near = stock(x, ids, weights)
        assert torch.allclose(near.float(), expected.float(), atol=0.1, rtol=0.1)
        different += int((near.view(torch.int16) != expected.view(torch.int16)).sum())
    return different, ours.num_experts


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["deepseek_v4", "qwen3_moe"])
def test_experts_of_transformers(pool, family, size):
    pytest.importorskip("transformers.distributed.expert_parallel")
    for different, own in pool.run(exact, size, family):
        assert own == EXPERTS // size
        assert different > 0  # the stock all-reduce is near, and not equal


def refused(ranks: Ranks) -> str:
    from types import SimpleNamespace

    from exactmoe.hf.expert_parallel import ExactExperts

    ep, tp = (SimpleNamespace(mesh=torch.tensor(found)) for found in ([0, 1], [0]))
    try:
        ExactExperts(experts_module("qwen3_moe"), ep, tp)
    except ValueError as error:
        return str(error)
    return "nothing was said"


def test_ranks_with_other_batches_are_refused(pool):
    for said in pool.run(refused, 2):
        assert "over ranks [0, 1], and ranks [0] hold one batch; allowed: ep_size equal" in said
