"""`DistributedConfig(ep_implementation="exactmoe")`: transformers' expert parallel with exact bits.

transformers cuts the experts' parameters over the ranks; its own all-reduce adds parts that each
rank has rounded already. Here the slots come back as they are, or as vectors of whole subtrees. It
is the contract of `experts_implementation="exactmoe"`: routed experts, rounded once.
"""

from typing import Any

import torch
from torch import Tensor, nn

from exactmoe.config import MoEConfig
from exactmoe.errors import ConfigError
from exactmoe.hf import storage
from exactmoe.hf.adapter import register_expert_parallel
from exactmoe.hf.experts import NAME, checked_call, numerics_of, require_known
from exactmoe.parallel.rank_bank import RankBank
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.parallel.ranks import Ranks
from exactmoe.ranked import RankedLayer


class ExactExperts:
    """What transformers calls in the place of an experts module, one for each.

    Args:
        experts: the module; its parameters hold this rank's experts.
        ep_mesh: the ranks that the experts are cut over, evenly and in order.
        tp_mesh: the ranks that hold the same batch.

    Raises:
        ConfigError: the ranks of the experts do not hold the same batch.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        self.experts, self._cache = experts, storage.LayerCache()
        ranks, batch = (mesh.mesh.flatten().tolist() for mesh in (ep_mesh, tp_mesh))
        if ranks != batch:
            raise ConfigError(
                f"the experts lie over ranks {ranks}, and ranks {batch} hold one batch; allowed: "
                "ep_size equal to tp_size"
            )
        device = ep_mesh.device_type
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"
        self.ranks = Ranks(device, ep_mesh.get_group())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states bfloat16 [T, H], the same on every rank; global ids and weights [T, K] ->
        bfloat16 [T, H].
        """
        own: Any = self.experts.num_experts
        num_experts = own * self.ranks.size
        ids, weights = checked_call(
            self.experts, hidden_states, top_k_index, top_k_weights, num_experts
        )
        top_k = ids.shape[1]
        layer = self._cache.get(self.experts, lambda: self._build(num_experts, top_k), top_k)
        return layer.experts(hidden_states, ids, weights)  # type: ignore[no-any-return]

    def _build(self, num_experts: int, top_k: int) -> RankedLayer:
        limit = require_known(self.experts)
        own = storage.bank(self.experts, fixed_order=True)
        config = MoEConfig(
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            swiglu_limit=limit,
            numerics=numerics_of(self.experts),
        )
        return RankedLayer(config, RankBank(own, RankWire(self.ranks, num_experts)))


def register() -> None:
    """Make the name known to transformers. Importing exactmoe.hf does it."""
    register_expert_parallel(NAME, ExactExperts)
