"""One benchmark: verify, then time, width by width; then the peers over the same selections."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from exactmoe import env
from exactmoe.bench import bits, ours, problem
from exactmoe.bench.ceilings import Ceilings, measure_ceilings
from exactmoe.bench.peers import OWN, DensePeer, Peer, chosen
from exactmoe.bench.problem import Problem, Selection
from exactmoe.bench.record import BLOCK, DENSE, EXPERTS, OURS, SORT, Record
from exactmoe.bench.shapes import Shape
from exactmoe.bench.timing import Call, Timer, Timing
from exactmoe.bench.truth import Truth, dense_truth, experts_truth
from exactmoe.config import Limits
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError
from exactmoe.layer import MoELayer
from exactmoe.runtime import workspace

PARTS = ("experts", "sort", "block", "dense")
# Selections that the calls of one measurement take in turn.
ROTATED, ROTATED_WIDE, WIDE = 16, 8, 256
# Weights of a dense part are repeated until they are this large: no cache holds the next call's.
DENSE_BYTES = {"cuda": 2**30, "cpu": 0}
Make = Callable[[Selection], Call]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to benchmark.

    Attributes:
        shape, format, numerics: of the layer.
        device, backend: where, and by which of our paths.
        widths: tokens a call.
        parts: of PARTS.
        peers: names, or ("all",), ("none",).
        tiles: forced tiles that are timed besides.
        seed: chooses weights and selections.
    """

    shape: Shape
    format: str
    numerics: str
    device: torch.device
    backend: str
    widths: tuple[int, ...]
    parts: tuple[str, ...] = PARTS
    peers: tuple[str, ...] = ("none",)
    tiles: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"widths are {self.widths}; allowed: positive integers")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ConfigError(f"parts are {unknown}; allowed: {', '.join(PARTS)}")
        chosen(self.peers)


@dataclass
class Bench:
    """The layer, the selections and the ceilings of one benchmark.

    Raises (by `records`):
        BitMismatch: bytes differ between widths, paths, or eager and captured calls.
    """

    settings: Settings
    timer: Timer
    say: Say = lambda text: None
    _truths: dict[tuple[str, int], Truth] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings, shape = self.settings, self.settings.shape
        device = settings.device
        self.say(f"drawing weights: {shape.name}, {settings.format}")
        self._rng = torch.Generator(device).manual_seed(settings.seed)
        self.problem = problem.draw_problem(shape, settings.format, device, self._rng)
        self._problems = {settings.format: self.problem}
        widest = max(settings.widths)
        self.selections = problem.draw_selections(shape, widest, ROTATED, device, self._rng)
        shared = problem.draw_dense(shape, shape.shared_size, device, self._rng, settings.backend)
        self.layer = MoELayer(
            shape.config(settings.numerics),
            self.problem.bank(),
            problem.draw_router(shape, device, self._rng),
            shared,
            cards=(str(self.problem.device),),
            limits=Limits(max_rows=widest),
            backend=settings.backend,
        )
        self.say("measuring the machine")
        self.ceilings: Ceilings = measure_ceilings(
            self.problem.device,
            (shape.num_experts, self.problem.expert_bytes),
            settings.numerics,
            timer=self.timer,
        )
        self._distinct = {
            width: sum(s.distinct_experts() for s in self._at(width)) / len(self._at(width))
            for width in settings.widths
        }

    def records(self) -> Iterator[Record]:
        """Verifies, then yields each number as it is measured: ours first, then the peers."""
        experts, dense = chosen(self.settings.peers)
        yield from self._own_experts()
        if "dense" in self.settings.parts:
            for size in self.settings.shape.dense_sizes:
                yield from self._dense(size, dense)
        if "experts" in self.settings.parts:
            for peer in experts:
                yield from self._peer(peer)

    def _at(self, width: int) -> list[Selection]:
        count = ROTATED if width <= WIDE else ROTATED_WIDE
        return [selection.first(width) for selection in self.selections[:count]]

    def _own_experts(self) -> Iterator[Record]:
        layer, settings, widest = self.layer, self.settings, self.selections[0]
        asked = [part for part in ("experts", "sort", "block") if part in settings.parts]
        if not asked:
            return
        self.say("verifying bytes")
        scratch = ours.Scratch(layer, max(settings.widths))
        makers: dict[str, Make] = {
            EXPERTS: lambda selection: ours.Presorted(layer, selection, scratch),
            SORT: lambda selection: ours.with_sort(layer, selection),
            BLOCK: lambda selection: ours.block(layer, selection),
        }
        names = dict(zip(("experts", "sort", "block"), makers, strict=True))
        for part in asked:
            make = makers[names[part]]
            bits.verify_widths(names[part], _run(make), widest, settings.widths)
        both = (_run(makers[SORT])(widest), _run(makers[EXPERTS])(widest))
        bits.require_equal("experts with a sort made before", *both)
        for width in settings.widths:
            for part in asked:
                self.say(f"{names[part]}, {width} tokens")
                yield self._own(names[part], OURS, makers[names[part]], width)
            for tile in settings.tiles:
                self.say(f"tile {tile}, {width} tokens")
                yield self._tile(tile, makers[EXPERTS], width)
        self._release()

    def _own(self, part: str, what: str, make: Make, width: int) -> Record:
        timing, y = self._measure(make, width, exact=f"{part}, width {width}")
        error = quantized = None
        if part != BLOCK:
            error = self._truth(self.problem, width).error(y)
        if part != BLOCK and self.settings.numerics == "a8":
            quantized = experts_truth(self.problem, self._at(width)[0], True).error(y)
        return Record(
            part=part,
            what=what,
            tokens=width,
            timing=timing,
            floor_us=self._floor(part, width),
            nbytes=self._nbytes(part, width),
            distinct_experts=self._distinct[width],
            error=error,
            quantized_error=quantized,
            same_bits=True,
        )

    def _tile(self, tile: int, make: Make, width: int) -> Record:
        what = f"{OURS} tile {tile}"
        with env.forced("EXACTMOE_TILE", str(tile)):
            try:
                return self._own(EXPERTS, what, make, width)
            except ConfigError as error:
                return Record(EXPERTS, what, width, note=str(error))

    def _measure(self, make: Make, width: int, exact: str = "") -> tuple[Timing, Tensor]:
        """Time of one call, and y of the first selection as a replay wrote it."""
        calls = [make(selection) for selection in self._at(width)]
        eager = [call().clone() if exact else call() for call in calls]
        replay = self.timer.capture(calls)
        if exact:
            bits.verify_replay(exact, replay, eager)
        else:
            bits.poison(replay)
            replay.run()
        return replay.time(), replay.outputs[0].clone()

    def _flops(self, size: int, rows: int) -> float:
        return 2.0 * rows * 3 * self.settings.shape.hidden_size * size

    def _nbytes(self, part: str, width: int) -> float:
        return self._distinct[width] * self.problem.expert_bytes + (
            self._block_bytes() if part == BLOCK else 0
        )

    def _block_bytes(self) -> int:
        router, shared = self.layer.router, self.layer.shared
        return sum(
            buffer.nbytes
            for module in (router, shared)
            if module is not None
            for buffer in module.buffers()
        )

    def _floor(self, part: str, width: int) -> float:
        shape = self.settings.shape
        flops = self._flops(shape.intermediate_size, width * shape.top_k)
        floor = self.ceilings.experts_us(self._distinct[width], flops)
        if part == BLOCK:
            flops = self._flops(shape.shared_size, width)
            flops += 2.0 * width * shape.hidden_size * shape.num_experts
            floor += self.ceilings.dense_us(self._block_bytes(), flops)
        return floor

    def _truth(self, given: Problem, width: int) -> Truth:
        key = (given.format, width)
        if key not in self._truths:
            self._truths[key] = experts_truth(given, self._at(width)[0])
        return self._truths[key]

    def _peer(self, peer: Peer) -> Iterator[Record]:
        try:
            yield from self._peer_widths(peer)
        # Whatever a peer raises is a line of the table; ours has been measured by then.
        except Exception as error:  # noqa: BLE001
            yield Record(EXPERTS, peer.name, 0, note=_reason(error))
        self._release()

    def _peer_widths(self, peer: Peer) -> Iterator[Record]:
        settings, first = self.settings, None
        self.say(f"{peer.name}: preparing")
        format = settings.format if peer.format == OWN else peer.format
        if format not in self._problems:
            self._problems[format] = self.problem.as_format(format, self._rng)
        given = self._problems[format]
        make = peer.build(given, settings.widths)
        for width in settings.widths:
            self.say(f"{peer.name}, {width} tokens")
            timing, y = self._measure(make, width)
            first = y[0] if first is None else first
            yield Record(
                part=EXPERTS,
                what=peer.name,
                tokens=width,
                timing=timing,
                floor_us=self._floor(EXPERTS, width),
                nbytes=self._distinct[width] * given.expert_bytes,
                distinct_experts=self._distinct[width],
                error=self._truth(given, width).error(y),
                same_bits=bool(torch.equal(y[0], first)),
                note=peer.what,
            )

    def _dense(self, size: int, peers: Sequence[DensePeer]) -> Iterator[Record]:
        settings, part = self.settings, f"{DENSE} {size}"
        device, shape = self.problem.device, settings.shape
        nbytes = 2 * 3 * shape.hidden_size * size
        copies = max(1, -(-DENSE_BYTES[device.type] // nbytes))
        layers = [
            problem.draw_dense(shape, size, device, self._rng, settings.backend)
            for _ in range(copies)
        ]
        for layer in layers:
            layer.reserve(max(settings.widths))
        self.say(f"{part}: verifying bytes")
        call = _dense_call(layers[0])
        bits.verify_widths(part, call, self.selections[0], settings.widths)
        makers: dict[str, list[Callable[[Tensor], Call]]] = {
            OURS: [partial(ours.dense, layer) for layer in layers]
        }
        failed = []
        for peer in peers:
            try:
                makers[peer.name] = [peer.build(layer) for layer in layers]
            except Exception as error:  # noqa: BLE001 - as in _peer
                failed.append(Record(part, peer.name, 0, note=_reason(error)))
        for width in settings.widths:
            floor = self.ceilings.dense_us(nbytes, self._flops(size, width))
            x = self.selections[0].first(width).x
            truth = dense_truth(layers[0], x)
            for what, makes in makers.items():
                self.say(f"{part}, {what}, {width} tokens")
                exact = f"{part}, width {width}" if what == OURS else ""
                try:
                    timing, y = self._measure_dense(makes, x, exact)
                except Exception as error:
                    if what == OURS:
                        raise
                    yield Record(part, what, width, note=_reason(error))
                    continue
                yield Record(
                    part=part,
                    what=what,
                    tokens=width,
                    timing=timing,
                    floor_us=floor,
                    nbytes=nbytes,
                    error=truth.error(y),
                    same_bits=True if what == OURS else None,
                )
        yield from failed
        del layers, makers
        self._release()

    def _measure_dense(
        self, makes: Sequence[Callable[[Tensor], Call]], x: Tensor, exact: str
    ) -> tuple[Timing, Tensor]:
        calls = [make(x) for make in makes]
        eager = [call().clone() for call in calls]
        replay = self.timer.capture(calls)
        if exact:
            bits.verify_replay(exact, replay, eager)
        return replay.time(), replay.outputs[0].clone()

    def _release(self) -> None:
        """Gives back what is not used any more; no graph of an earlier measurement is."""
        gc.collect()
        if self.problem.device.type == "cuda":
            workspace.release_captures(self.problem.device)
            torch.cuda.empty_cache()


def _run(make: Make) -> Callable[[Selection], Tensor]:
    return lambda selection: make(selection)()


def _dense_call(layer: DenseMLP) -> Callable[[Selection], Tensor]:
    return lambda selection: layer(selection.x)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
