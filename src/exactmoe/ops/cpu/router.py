"""router: expert ids and weights of each token."""

import numpy as np
from torch import Tensor

from exactmoe.config import Numerics
from exactmoe.kernels.cpu import router as kernels
from exactmoe.kernels.cpu.dot import tile_address
from exactmoe.ops.cpu.threads import launch
from exactmoe.ops.path import RouterWeights


def router(
    x: Tensor,
    router: RouterWeights,
    token_ids: Tensor | None,
    numerics: Numerics,
    logits: Tensor,
    routed: tuple[Tensor, Tensor],
) -> None:
    """x float32 [T, H] (values of bf16) -> logits float32 [T, E], and routed: expert_ids int32
    [T, K] and weights float32 [T, K].

    A hash layer's ids come from router.table [V, K] by token_ids int64 [T].
    """
    weight = router.weight_f32.numpy()
    num_tokens, num_experts = x.shape[0], weight.shape[0]
    tiles = (tile_address("f32", 1), tile_address("f32", 4))
    blocks = -(-num_experts // kernels.EXPERTS) if num_tokens else 0
    launch(
        kernels.logits, (x.numpy(), weight, *tiles, logits.numpy()), blocks, x.numel() * num_experts
    )

    hashed = router.table is not None and token_ids is not None
    arguments = (
        logits.numpy(),
        np.empty(0, np.float32) if router.bias is None else router.bias.numpy(),
        router.table.numpy() if hashed else np.empty((0, 1), np.int64),
        token_ids.numpy() if token_ids is not None and hashed else np.empty(0, np.int64),
        router.config.score == "sigmoid",
        np.float32(router.config.factor),
        router.config.normalize,
        numerics.router == "bf16_ladder",
        *(tensor.numpy() for tensor in routed),
    )
    launch(kernels.select, arguments, num_tokens, num_tokens * num_experts * 64)
