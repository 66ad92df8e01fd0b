"""MoELayer: a whole MoE block, one bit pattern for a token at every width.

Each piece of a call runs the data path of docs/design.md: router, route table, gate_up, (quantize),
down, combine. y is the only allocation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from exactmoe import ops
from exactmoe.bank import ExpertBank, Router, SplitBank
from exactmoe.block import Block, Space, lever
from exactmoe.config import Limits, MoEConfig, Numerics, Placement, checked_width
from exactmoe.dense import DenseMLP, dense_regions
from exactmoe.errors import BitMismatch, ConfigError, Unsupported
from exactmoe.formats.units import PIECE
from exactmoe.ops import Storage, compiled
from exactmoe.parallel import Answer, Vectors, place
from exactmoe.parallel.cards import card_of
from exactmoe.plan import Explanation, Plan, choose, explain
from exactmoe.routed import answered, card_regions, card_space, expert_regions, expert_tiles
from exactmoe.runtime.card_load import CardLoad
from exactmoe.runtime.door import OUTPUT_DTYPES, check_routes, check_token_ids, check_x, output
from exactmoe.runtime.trace import RouteRing
from exactmoe.runtime.workspace import Arena, Region

# Of the contract (section 4): the chains of a router logit.
ROUTER_SEGMENTS = 16


class MoELayer(Block):
    """A mixture-of-experts block: router, routed experts, shared expert, combine.

    Args:
        config: geometry, top_k, clamp, numerics.
        bank: the packed experts, all `num_experts` of the config; or already split over the cards.
            Where there are several cards, a whole bank is copied to them and stays as it is.
        router: needed by `layer(x)`, not by `layer.experts(x, ids, weights)`.
        shared: the shared expert, added before the one rounding to the output type.
        placement: cards; `cards` is short for Placement(cards=cards).
        limits: tokens a piece, checks.
        backend: "auto", or a name of plan.BACKENDS. On one device all give the same bits.
    """

    fault: Tensor
    lost: Tensor

    def __init__(
        self,
        config: MoEConfig,
        bank: ExpertBank | SplitBank,
        router: Router | None = None,
        shared: DenseMLP | None = None,
        placement: Placement | None = None,
        cards: Sequence[str] | None = None,
        limits: Limits | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(limits, backend)
        self.config = config
        self.bank, self.router, self.shared = bank, router, shared
        self._require_fit()
        placed = place(bank, placement, cards)
        self.placement, self.bank, self.cards = placed.placement, placed.bank, placed.cards
        # Words that a call writes on the device and `check` reads.
        for name in ("fault",) if self.cards is None else ("fault", "lost"):
            with torch.inference_mode(False):  # else it could not be written outside of that mode
                word = torch.zeros(1, dtype=torch.int64, device=bank.device)
            self.register_buffer(name, word, persistent=False)
        self.kind = hash((config, self.bank.formats))
        self.route_ring: RouteRing | None = None  # records what tokens chose, while it is set
        self.card_load: CardLoad | None = None  # counts the slots of each card, while it is set
        self.plan()
        self._ready()

    @property
    def device(self) -> torch.device:
        return self.bank.device

    @property
    def numerics(self) -> Numerics:
        return Numerics.of(self.config.numerics)

    def _a8_units(self) -> str:
        return self.numerics.a8_units

    def _require_fit(self) -> None:
        config, bank = self.config, self.bank
        asked = (config.num_experts, config.hidden_size, config.intermediate_size)
        found = (bank.num_experts, bank.hidden_size, bank.intermediate_size)
        if found != asked:
            raise ConfigError(
                f"the bank is {found} (experts, hidden, intermediate); the config asks for {asked}"
            )
        sizes = (config.hidden_size, config.intermediate_size)
        if self.numerics.activation == "a8" and any(size % PIECE for size in sizes):
            raise Unsupported(
                f"hidden and intermediate size are {sizes}; class a8 needs multiples of {PIECE}"
            )
        if self.numerics.activation == "a8" and "fp8" in bank.formats:
            raise Unsupported(
                f"the experts are {', '.join(bank.formats)} (gate, up, down) and the class is a8; "
                "FP8 experts run in class a16 only: no order is defined for a block scale of the "
                "weight beside the scale of a token"
            )
        if self.router is not None:
            self._check_router(self.router)
        if self.shared is not None and self.shared.hidden_size != config.hidden_size:
            raise ConfigError(
                f"shared expert has hidden_size {self.shared.hidden_size}; "
                f"allowed: {config.hidden_size}"
            )

    def _check_router(self, router: Router) -> None:
        config = self.config
        found, asked = (
            (router.num_experts, router.hidden_size),
            (config.num_experts, config.hidden_size),
        )
        if found != asked:
            raise ConfigError(
                f"the router is {found} (experts, hidden); the config asks for {asked}"
            )
        if config.top_k > config.num_experts:
            raise ConfigError(
                f"top_k is {config.top_k}; allowed: at most num_experts = {config.num_experts}"
            )
        if router.table is not None and router.table.shape[1] != config.top_k:
            raise ConfigError(
                f"the table gives {router.table.shape[1]} ids a token; top_k is {config.top_k}"
            )

    def _require_router(self) -> Router:
        if self.router is None:
            raise ConfigError(
                "this layer has no router; call layer.experts(x, expert_ids, weights)"
            )
        return self.router

    def plan(self) -> Plan:
        return choose(
            self.numerics, self.device, self.backend, self.bank.shapes, self.bank.fixed_order
        )

    def regions(self, rows: int, storage: Storage) -> list[Region]:
        shared = None if self.shared is None else self.shared.intermediate_size
        if self.cards is None:
            return moe_regions(self.config, shared, rows, storage)
        regions = block_regions(self.config, shared, rows, storage)
        for card in range(self.cards.num_cards):
            regions += card_regions(self.config, self.cards, card, rows, storage)
        return regions

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (self.device,) if self.cards is None else tuple(dict.fromkeys(self.cards.devices))

    def regions_on(self, device: torch.device, rows: int, storage: Storage) -> list[Region]:
        regions = self.regions(rows, storage)
        if self.cards is None:
            return regions
        return [region for region in regions if self.cards.devices[card_of(region)] == device]

    def _space(self, path: ops.Path, held: Arena, rows: int) -> Space:
        if self.cards is None:
            return super()._space(path, held, rows)
        return card_space(self, self.cards, path, held, rows)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """How many experts each card of this process runs."""
        return (self.bank.num_experts,) if self.cards is None else self.cards.partition.counts

    def explain(self, width: int = 8) -> Explanation:
        """Which path runs a call of `width` tokens, and why; the matrix units that each expert may
        use; which card owns what, and what is sent.
        """
        rows = min(checked_width(width), self.max_rows)
        tiles = expert_tiles(self, rows * self.config.top_k)
        if self.shared is not None:
            tiles += self.shared.tiles(self.plan(), rows)
        found = explain(self.plan(), self.numerics, self.limits, width, self.bank.weights(), tiles)
        if self.cards is None:
            return found
        storage = ops.path(self.plan().path).storage
        return replace(found, cards=tuple(self.cards.describe(rows, self.config, storage)))

    def check(self) -> None:
        """Raise ConfigError if a call since the last check met an expert id >= num_experts (it was
        taken as absent), BitMismatch if several cards together served more or fewer slots than it
        had.
        """
        if self.cards is not None and int(self.lost):
            self.lost.zero_()
            raise BitMismatch(
                f"the cards of the partition [{self.cards.partition}] have not served each slot "
                "once; results since the last check may be wrong"
            )
        if int(self.fault):
            self.fault.zero_()
            raise ConfigError(
                f"an expert id was >= num_experts = {self.config.num_experts}; "
                "its slot was taken as absent"
            )

    def reset(self) -> None:
        super().reset()
        if self.cards is not None:
            self.lost.zero_()  # a call that failed counted only a part

    def forward(
        self, x: Tensor, token_ids: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The whole block: x bfloat16 [T, H] (token_ids [T] for a hash layer) -> y [T, H]."""
        if torch.compiler.is_compiling():
            compiled.refuse_out(out is not None)
            dtype = OUTPUT_DTYPES[self.numerics.output]
            return compiled.block(self, MoELayer.forward, x, token_ids, dtype)
        router = self._require_router()
        check_x(x, self.config.hidden_size, self.device)
        check_token_ids(token_ids, x.shape[0], router.checked_table)
        inputs = {"x": x}
        if token_ids is not None and router.table is not None:
            inputs["token_ids"] = token_ids
        y = self._output(out, inputs)

        def compute(space: Space, piece: slice) -> None:
            rows, ids = space.staged(x[piece]), _piece_of(token_ids, piece)
            self._experts(space, rows, lambda: self._route(space, rows, ids), self.shared, y[piece])

        self._in_pieces(x.shape[0], compute)
        return self._finished(y)

    def experts(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Routed experts only: x bfloat16 [T, H], expert_ids int32/int64 [T, K], weights float32
        [T, K] -> y [T, H].

        id < 0: absent. id >= E: absent, and `check()` raises (at once with Limits(checks=True)).
        Ids may repeat.
        """
        if torch.compiler.is_compiling():
            compiled.refuse_out(out is not None)
            dtype = OUTPUT_DTYPES[self.numerics.output]
            return compiled.experts(self, MoELayer.experts, x, expert_ids, weights, dtype)
        check_x(x, self.config.hidden_size, self.device)
        check_routes(expert_ids, weights, x.shape[0], self.config.top_k, self.device)
        y = self._output(out, {"x": x, "expert_ids": expert_ids, "weights": weights})

        def compute(space: Space, piece: slice) -> None:
            rows, given = space.staged(x[piece]), (expert_ids[piece], weights[piece])
            self._experts(space, rows, lambda: self._stage(space, *given), None, y[piece])

        self._in_pieces(x.shape[0], compute)
        return self._finished(y)

    def route(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The router alone: x bf16 [T, H] -> expert_ids int32 [T, K], weights float32 [T, K]."""
        router = self._require_router()
        check_x(x, self.config.hidden_size, self.device)
        check_token_ids(token_ids, x.shape[0], router.checked_table)
        shape = (x.shape[0], self.config.top_k)
        expert_ids = torch.empty(shape, dtype=torch.int32, device=x.device)
        weights = torch.empty(shape, dtype=torch.float32, device=x.device)

        def compute(space: Space, piece: slice) -> None:
            rows = space.staged(x[piece])
            ids, values = self._route(space, rows, _piece_of(token_ids, piece))
            expert_ids[piece].copy_(ids)
            weights[piece].copy_(values)

        self._in_pieces(x.shape[0], compute)
        return expert_ids, weights

    def _stage(self, space: Space, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """A caller's ids and weights, of any stride, as the path reads them; ids beyond int32 stay
        out of range.
        """
        shape = ids.shape
        wide, narrow, given = (
            space.rows(name, ids.numel()).view(shape)
            for name in ("wide_ids", "expert_ids", "weights")
        )
        if ids.dtype != torch.int32 or not space.reads(ids):
            ids = narrow.copy_(wide.copy_(ids).clamp_(-1, self.config.num_experts))
        return ids, weights if space.reads(weights) else given.copy_(weights)

    def _route(self, space: Space, x: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids int32 [T, K] and weights float32 [T, K] of one piece, from the router."""
        path, shape = space.path, (x.shape[0], self.config.top_k)
        ids, weights = (
            space.rows(name, shape[0] * shape[1]).view(shape) for name in ("expert_ids", "weights")
        )
        router = self._require_router()
        if token_ids is not None and router.table is not None:
            token_ids = space.rows("token_ids", shape[0]).copy_(token_ids)
        logits, parts = space.rows("logits", shape[0]), None
        if shape[0] <= path.storage.router_parts:
            part = space.arrays["logit_parts"].view(-1)[: ROUTER_SEGMENTS * logits.numel()]
            parts = part.view(ROUTER_SEGMENTS, *logits.shape)
        path.router(x, router, token_ids, self.numerics, logits, (ids, weights), parts)
        return ids, weights

    def _experts(
        self,
        space: Space,
        x: Tensor,
        route: Callable[[], tuple[Tensor, Tensor]],
        shared: DenseMLP | None,
        y: Tensor,
    ) -> None:
        """One piece: route() gives its (ids, weights), experts and shared expert run, beside each
        other where they can, and are combined into y.
        """

        def experts() -> Answer | Vectors:
            routed = route()
            if self.route_ring is not None:
                self.route_ring.record(routed[0])
            return answered(self, space, x, routed)

        if shared is not None:
            shared.say_first(space, x.shape[0], self.plan)
        dense = None
        if shared is None:
            answer = experts()
        elif self.device.type == "cuda" and lever("EXACTMOE_SHARED_STREAM"):
            dense, answer = space.arena.side.run(lambda: shared.run(space, x), experts)
        else:
            dense = shared.run(space, x)
            answer = experts()
        answer.into(space.path, dense, y)

    def _prepare(self, path: ops.Path) -> None:
        self.bank.prepared_for(path)
        if self.shared is not None:
            self.shared._prepare(path)
        if self.router is not None:
            _ = self.router.checked_table
            if self.router.weight_bf16 is None:
                _ = self.router.weight_f32

    def _output(self, out: Tensor | None, inputs: dict[str, Tensor]) -> Tensor:
        own = {} if out is None else self._own_memory()
        return output(out, inputs, own, self.config.hidden_size, self.numerics.output)

    def _finished(self, y: Tensor) -> Tensor:
        if self._limits.checks:
            self.check()
        return y


def moe_regions(
    config: MoEConfig, shared_size: int | None, rows: int, storage: Storage
) -> list[Region]:
    """The workspace of a piece of `rows` tokens of a MoE block on one card, without a layer;
    shared_size: I of its shared expert.
    """
    own = expert_regions(config, config.num_experts, rows, storage)
    return block_regions(config, shared_size, rows, storage) + own


def block_regions(
    config: MoEConfig, shared_size: int | None, rows: int, storage: Storage
) -> list[Region]:
    """As `moe_regions`, without what the routed experts need."""
    hidden, experts, slots = config.hidden_size, config.num_experts, rows * config.top_k
    f32, i64 = torch.float32, torch.int64
    regions = [
        Region("x", (rows, hidden), storage.x),
        Region("wide_ids", (slots,), i64),
        Region("token_ids", (rows,), i64),
        Region("expert_ids", (slots,), torch.int32),
        Region("weights", (slots,), f32),
        Region("logits", (rows, experts), f32),
    ]
    if storage.router_parts:
        parts = (ROUTER_SEGMENTS, min(rows, storage.router_parts), experts)
        regions.append(Region("logit_parts", parts, f32))
    if Numerics.of(config.numerics).activation == "a8":
        regions.append(Region("x_codes", (rows, hidden), storage.codes))
        regions.append(Region("x_scales", (rows, hidden // PIECE), f32))
    if shared_size is not None:
        regions += dense_regions(hidden, shared_size, rows, storage)[1:]  # its x is ours
    return regions


def _piece_of(token_ids: Tensor | None, piece: slice) -> Tensor | None:
    return None if token_ids is None else token_ids[piece]
