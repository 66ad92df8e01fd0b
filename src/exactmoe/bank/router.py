"""Router: scores or a token table to expert ids and weights (contract section 6)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exactmoe.bank.module import ExactModule, Seen
from exactmoe.config import RouterConfig
from exactmoe.errors import ConfigError


class Router(ExactModule):
    """Weights of a router.

    Args:
        weight: bfloat16 or float32 [E, H].
        bias: float32 [E] or None: added to the score for the selection only, never narrowed.
        table: integer [V, K] or None: a hash layer takes its ids from here, by token id. Ids may
            repeat in a row.
        config: score, factor, normalize.

    Raises:
        ConfigError: a dtype or shape that does not fit, a bias beside a table, or a table id
            outside [0, E).
    """

    weight: Tensor
    bias: Tensor | None
    table: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        table: Tensor | None = None,
        *,
        config: RouterConfig,
    ) -> None:
        super().__init__()
        if weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"weight is {weight.dtype} {tuple(weight.shape)}; "
                "allowed: bfloat16 or float32 [E, H]"
            )
        if weight.shape[1] % 16:
            raise ConfigError(
                f"router weight has {weight.shape[1]} columns; allowed: a multiple of 16"
            )
        if bias is not None and (
            bias.dtype != torch.float32 or tuple(bias.shape) != (weight.shape[0],)
        ):
            raise ConfigError(
                f"bias is {bias.dtype} {tuple(bias.shape)}; allowed: float32 [{weight.shape[0]}]"
            )
        if table is not None:
            _check_table(table, weight.shape[0])
            if bias is not None:
                raise ConfigError("a router with a table got a bias; allowed: one of them")
        self.config = config
        # Detached: the parameters of a model in training mode must not pull autograd in. Rows lie
        # one after the other, as the kernels read them.
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach().contiguous())
        self.register_buffer("table", None if table is None else table.long().contiguous())
        # What dots read beside the weight itself; None: not made yet.
        self._weight_f32: tuple[Seen, Tensor] | None = None
        self._weight_bf16: tuple[Seen, Tensor | None] | None = None
        self._table_seen: Seen | None = self._seen(("table",))

    @property
    def num_experts(self) -> int:
        return int(self.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.weight.shape[1])

    @property
    def weight_f32(self) -> Tensor:
        """The weight as float32 [E, H], exact; made once until the weight changes."""
        kept = self._weight_f32
        if kept is None or self._changed(kept[0]):
            self._require_eager("the router's weight is read")
            seen = self._seen(("weight",))
            kept = self._weight_f32 = (seen, self.weight.float().contiguous())
        return kept[1]

    @property
    def weight_bf16(self) -> Tensor | None:
        """The weight as bfloat16 [E, H] where that is exact for every value, else None: what the
        matrix units of a GPU read (contract section 6); made once until the weight changes.
        """
        kept = self._weight_bf16
        if kept is None or self._changed(kept[0]):
            self._require_eager("the router's weight is read")
            seen, narrow = self._seen(("weight",)), self.weight.bfloat16()
            is_exact = narrow is self.weight or bool((narrow.float() == self.weight).all())
            kept = self._weight_bf16 = (seen, narrow.contiguous() if is_exact else None)
        return kept[1]

    @property
    def checked_table(self) -> Tensor | None:
        """The table; its ids are checked once until it changes.

        Raises:
            ConfigError: an id is outside [0, E).
        """
        if self._table_seen is None or self._changed(self._table_seen):
            seen = self._seen(("table",))
            if self.table is not None:
                self._require_eager("the router's table is read")
            if self.table is not None and self.table.device.type != "meta":
                _check_table(self.table, self.num_experts)
            self._table_seen = seen
        return self.table

    def _check(self) -> None:
        super()._check()
        _ = self.checked_table

    def _forget(self) -> None:
        super()._forget()
        self._weight_f32, self._weight_bf16, self._table_seen = None, None, None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        table = state_dict.get(prefix + "table")
        if self.table is not None and isinstance(table, Tensor):
            _check_table(table, self.num_experts)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, object]:
        forgotten = {"_weight_f32": None, "_weight_bf16": None, "_table_seen": None}
        return {**super().__getstate__(), **forgotten}

    def extra_repr(self) -> str:
        kind = "hash" if self.table is not None else "score"
        return f"{kind}, num_experts={self.num_experts}, {self.config}"


def _check_table(table: Tensor, num_experts: int) -> None:
    if table.ndim != 2 or table.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"table is {table.dtype} {tuple(table.shape)}; allowed: int32 or int64 [V, K]"
        )
    bad = (table < 0) | (table >= num_experts)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ConfigError(
            f"table row {row}, column {column} is {int(table[row, column])}; "
            f"allowed: 0 to {num_experts - 1}"
        )
