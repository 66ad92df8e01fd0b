"""RankedLayer: a MoE block whose experts are spread over ranks, with the bits of one card.

Every rank calls the layer in the same order. Tokens are the same on all ranks, or each rank's own
(docs/ranks.md).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bank import ExpertBank, Router
from exactmoe.block import Space, lever
from exactmoe.config import Limits, MoEConfig, checked_max_rows
from exactmoe.dense import DenseMLP
from exactmoe.errors import BitMismatch, ConfigError, Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.layer import MoELayer, block_regions
from exactmoe.ops import Storage
from exactmoe.parallel import Answer, Message, Program
from exactmoe.parallel.rank_bank import RankBank, digest, program_facts
from exactmoe.parallel.rank_exchange import Hall, exchange_ranks
from exactmoe.parallel.rank_wire import RankWire
from exactmoe.plan import Explanation
from exactmoe.ranked_dense import RankedDense
from exactmoe.routed import expert_regions, program, say_once
from exactmoe.runtime.workspace import Region

# Of own tokens: what the current call, and its current piece, are padded to on every rank.
_width: ContextVar[int | None] = ContextVar("width", default=None)
_piece: ContextVar[int] = ContextVar("piece")


class RankedLayer(MoELayer):
    """A mixture-of-experts block over ranks.

    Every rank makes it in the same order; they compare versions, config, partition and router.
    `check()` is called on all of them together.

    Args:
        config: geometry, top_k, clamp, numerics; the same on every rank.
        bank: this rank's experts; or all of them, of which it copies its own.
        wire: who owns what, whose tokens, what comes back; not needed with a RankBank.
        router: all of it, on every rank.
        shared: on every rank; a RankedDense computes its own output rows only. It needs replicated
            tokens.
        limits: tokens a piece (own tokens: of each rank), checks. With `checks` the ranks also
            compare the inputs of every call of replicated tokens.
        backend: "auto", or a name of plan.BACKENDS.

    Raises:
        ConfigError: the ranks disagree, or what MoELayer refuses.
        RankLost: a rank does not answer.
    """

    bank: RankBank  # type: ignore[assignment]

    def __init__(
        self,
        config: MoEConfig,
        bank: RankBank | ExpertBank,
        wire: RankWire | None = None,
        router: Router | None = None,
        shared: DenseMLP | None = None,
        limits: Limits | None = None,
        backend: str = "auto",
    ) -> None:
        if not isinstance(bank, RankBank):
            if wire is None:
                raise ConfigError("wire is None; allowed: a RankWire, or a RankBank as bank")
            bank = RankBank.cut(bank, wire)
        elif wire not in (None, bank.wire):
            raise ConfigError("wire is another one than the bank's; allowed: that, or None")
        super().__init__(
            config,
            bank,  # type: ignore[arg-type]
            router,
            shared,
            limits=limits,
            backend=backend,
        )
        if self.wire.own_tokens and self.shares_dense_rows:
            raise ConfigError(
                "tokens is 'own' and the shared expert is cut by output rows; allowed: a DenseMLP, "
                "whole on every rank"
            )
        with torch.inference_mode(False):
            lost = torch.zeros(1, dtype=torch.int64, device=bank.device)
        self.register_buffer("lost", lost, persistent=False)
        self.wire.ranks.agree(f"a layer on {self.wire.ranks}", self._facts())

    @property
    def wire(self) -> RankWire:
        """How the ranks work together."""
        return self.bank.wire

    @property
    def shares_dense_rows(self) -> bool:
        """Whether the shared expert is cut by output rows."""
        return isinstance(self.shared, RankedDense)

    def alone(self) -> MoELayer:
        """The same block on one card of every rank, for proofs: a copy of all experts. Every rank
        has to call it.
        """
        shared = self.shared.alone() if isinstance(self.shared, RankedDense) else self.shared
        limits, backend = self.limits, self.backend
        whole = self.bank.join()
        return MoELayer(self.config, whole, self.router, shared, limits=limits, backend=backend)

    def _facts(self) -> dict[str, object]:
        shared = None if self.shared is None or self.shares_dense_rows else self.shared
        return {
            **program_facts(self.wire),
            "the config": self.config.to_dict(),
            "the formats": self.bank.formats,
            "max_rows": self.max_rows,
            "checks": self.limits.checks,
            "the backend": self.plan().backend,
            "the router": digest(self.router),
            "the shared expert": (self.shared is None, digest(shared)),
        }

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        shared = None if self.shared is None else self.shared.regions(rows, storage)[1:]
        own = expert_regions(self.config, self.bank.own.num_experts, self.wire.rows(rows), storage)
        regions = block_regions(self.config, None, rows, storage) + (shared or [])
        return [*regions, *own, *self.wire.regions(rows, self.config, storage)]

    @property
    def expert_counts(self) -> tuple[int, ...]:
        return (self.bank.own.num_experts,)

    def explain(self, width: int = 8) -> Explanation:
        """As MoELayer.explain, of this rank's experts, with a token's way through the ranks."""
        rows = min(width, self.max_rows)
        storage = ops.path(self.plan().path).storage
        lines = self.wire.describe(rows, self.config, storage)
        if self.shared is not None:
            how = "by output rows" if self.shares_dense_rows else "whole on every rank"
            lines.append(f"shared expert: {how}")
        return replace(super().explain(width), cards=tuple(lines))

    def forward(
        self,
        x: Tensor,
        token_ids: Tensor | None = None,
        out: Tensor | None = None,
        width: int | None = None,
    ) -> Tensor:
        """As MoELayer.forward. width, of own tokens: the most tokens that any rank has in this
        call, the same number on every rank; None: max_rows. A rank may have none.
        """
        inputs = {"x": x} if token_ids is None else {"x": x, "token_ids": token_ids}
        with self._call(x, width, inputs):
            return super().forward(x, token_ids, out)

    def experts(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        out: Tensor | None = None,
        width: int | None = None,
    ) -> Tensor:
        """As MoELayer.experts; width as in `forward`."""
        inputs = {"x": x, "expert_ids": expert_ids, "weights": weights}
        with self._call(x, width, inputs):
            return super().experts(x, expert_ids, weights, out)

    @contextmanager
    def _call(self, x: Tensor, width: int | None, inputs: dict[str, Tensor]) -> Iterator[None]:
        if torch.compiler.is_compiling():
            yield
            return
        if self.device != self.wire.ranks.device:
            raise Unsupported(
                f"the layer was moved to {self.device}; allowed: {self.wire.ranks.device}, the "
                "device of this rank"
            )
        if self.wire.own_tokens:
            most = self.max_rows if width is None else checked_max_rows(width)
            if x.shape[0] > most:
                raise ConfigError(
                    f"x has {x.shape[0]} tokens and width is {most}; allowed: at most width, which "
                    "is the same on every rank (max_rows where it is not given)"
                )
        elif width is not None:
            raise ConfigError("width was given and tokens are replicated; allowed: None")
        elif self._limits.checks:
            facts = {f"{name} of a call": _bytes_of(tensor) for name, tensor in inputs.items()}
            self.wire.ranks.agree("replicated tokens", facts)
        before = _width.set(width)
        try:
            yield
        finally:
            _width.reset(before)

    def check(self) -> None:
        """As MoELayer.check, of all ranks: they call it together and raise together.

        Raises:
            BitMismatch: a rank served more or fewer slots than its experts had.
            ConfigError: an expert id was >= num_experts.
            RankLost: a rank does not answer.
        """
        ranks = self.wire.ranks
        mine = torch.cat((self.lost, self.fault))
        found = mine.new_empty(ranks.size, 2)
        ranks.all_gather(mine, found)
        lost, fault = found.cpu().unbind(1)
        self.lost.zero_()
        self.fault.zero_()
        if bool(lost.any()):
            raise BitMismatch(
                f"ranks {lost.nonzero().flatten().tolist()} of the partition "
                f"[{self.wire.partition}] have not served each slot of their experts once; results "
                "since the last check may be wrong"
            )
        if bool(fault.any()):
            raise ConfigError(
                f"an expert id was >= num_experts = {self.config.num_experts} on ranks "
                f"{fault.nonzero().flatten().tolist()}; its slot was taken as absent"
            )

    def _in_pieces(self, num_tokens: int, compute: Callable[[Space, slice], None]) -> None:
        if not self.wire.own_tokens:
            super()._in_pieces(num_tokens, compute)
            return
        asked = _width.get()

        def padded(space: Space, piece: slice) -> None:
            _piece.set(piece.stop - piece.start)
            compute(space, slice(min(piece.start, num_tokens), min(piece.stop, num_tokens)))

        # Every rank runs the pieces of the widest one; those beyond its own tokens are empty.
        super()._in_pieces(self.max_rows if asked is None else asked, padded)

    def _experts(
        self,
        space: Space,
        x: Tensor,
        route: Callable[[], tuple[Tensor, Tensor]],
        shared: DenseMLP | None,
        y: Tensor,
    ) -> None:
        # One after the other on one stream: collectives keep one order on all ranks.
        num_tokens, dense = x.shape[0], None
        if shared is not None and num_tokens:
            shared.say_first(space, num_tokens, self.plan)
            dense = shared.run(space, x)
        if num_tokens:
            routed = route()
        else:
            empty = (0, self.config.top_k)
            routed = (
                space.rows("expert_ids", 0).view(empty),
                space.rows("weights", 0).view(empty),
            )
        if self.route_ring is not None and num_tokens:
            self.route_ring.record(routed[0])
        answer = self._exchanged(space, x, routed)
        if num_tokens:
            answer.into(space.path, dense, y)

    def _exchanged(self, space: Space, x: Tensor, routed: tuple[Tensor, Tensor]) -> Answer:
        path = space.path
        if path.storage.reads_given and not lever("EXACTMOE_UNION"):
            raise Unsupported("EXACTMOE_UNION is off, and ranks run all tokens at once")
        say_once(self, space, routed[0].numel())
        rows = Rows(x, None)
        if self.numerics.activation == "a8":
            codes = Rows(space.rows("x_codes", len(x)), space.rows("x_scales", len(x)))
            rows = path.quantize(x, codes) if len(x) else codes
        count = _piece.get() if self.wire.own_tokens else x.shape[0]

        def start(message: Message) -> Program:
            return program(self, self.bank.own, space, message, self.fault)

        hall = Hall(path, space.arrays, self.config, self.lost, count, space.spans)
        return exchange_ranks(self.wire, hall, Message(rows, *routed), start)


def _bytes_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor of a call, read on the host."""
    holder = torch.nn.Module()
    holder.register_buffer("x", tensor)
    return digest(holder)
