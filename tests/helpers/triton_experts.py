"""The matrix ops of the Triton path beside the reference: inputs whose sums are exact in float32,
so that results are compared by bytes, whatever the order of a sum.

Weights are e2m1 numbers with block scales 1 and 2 and x are small integers; what follows a sum is
not exact, and follows the contract: global scales, chains of 128, silu, the rounding.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exactmoe import ops, reference
from exactmoe.formats import PackedWeight, e2m1
from exactmoe.formats.rows import Rows
from exactmoe.formats.scales import decode_e4m3, encode_e4m3
from exactmoe.ops.triton import dense_mlp, down, gate_up
from exactmoe.ops.triton.launch import Launch, architecture
from exactmoe.ops.triton.prepare import prepare
from exactmoe.plan.tiles import Tile
from exactmoe.reference.functions import to_bf16
from exactmoe.runtime.routes import RouteTable
from triton_device import DEVICE

FORMATS = ("nvfp4", "nvfp4-divide", "mxfp4", "bf16", "fp8")
# What the tests run with: 64 rows of the matrix unit, and few programs when interpreted.
TILE = Tile(tokens=16, rows=64, matrix_rows=64, columns=128, warps=4, stages=2)
SENTINEL = 3.0


def on_device(weight: PackedWeight) -> PackedWeight:
    parts = {
        name: None if (part := getattr(weight, name)) is None else part.to(DEVICE)
        for name in ("codes", "scales", "global_scale")
    }
    return replace(weight, **parts)


def exact_weight(rng: torch.Generator, format: str, *shape: int) -> PackedWeight:
    """Random codes [E, N, K] whose sums with small integers are exact."""
    experts, rows, columns = shape
    codes = torch.randint(0, 16, shape, generator=rng, dtype=torch.uint8)
    if format == "bf16":
        return PackedWeight("bf16", (e2m1.decode(codes) / 1024).bfloat16())
    if format == "fp8":
        scales = torch.rand(experts, -(-rows // 128), -(-columns // 128), generator=rng)
        return PackedWeight("fp8", encode_e4m3(e2m1.decode(codes)), (scales + 0.5) / 700)
    block = 32 if format == "mxfp4" else 16
    steps = torch.randint(0, 2, (experts, rows, columns // block), generator=rng)
    if format == "mxfp4":
        power = torch.randint(-11, -8, (experts, 1, 1), generator=rng)
        return PackedWeight("mxfp4", e2m1.pack(codes), (127 + power + steps).to(torch.uint8))
    scales = torch.where(steps == 0, 0x38, 0x40).to(torch.uint8)  # 1 and 2
    factors = (torch.rand(experts, generator=rng) + 0.5) / 700
    if format == "nvfp4":
        return PackedWeight("nvfp4", e2m1.pack(codes), scales, factors)
    return PackedWeight("nvfp4", e2m1.pack(codes), scales, 1 / factors, "divide")


def exact_rows(rng: torch.Generator, tokens: int, columns: int, scaled: bool) -> Rows:
    """Integers -2 ... 2, as the reference reads them; with scales 2^-3 ... 2^1 where `scaled`."""
    values = torch.randint(-2, 3, (tokens, columns), generator=rng).float()
    if not scaled:
        return Rows(values, None)
    return Rows(values, 2.0 ** torch.randint(-3, 2, (tokens, columns // 128), generator=rng))


def device_rows(rows: Rows) -> Rows:
    """The same rows in the path's types."""
    if rows.scales is None:
        return Rows(rows.values.bfloat16().to(DEVICE), None)
    codes = encode_e4m3(rows.values).view(torch.float8_e4m3fn)
    return Rows(codes.to(DEVICE), rows.scales.to(DEVICE))


def typed(expected: Tensor, found: Tensor) -> Tensor:
    """The reference's float32 in the type of what was found; torch's own NaN is another."""
    return expected if found.dtype == torch.float32 else to_bf16(expected)


def reference_rows(values: Tensor, scaled: bool) -> Rows:
    """Any float32 values as a class reads them."""
    if not scaled:
        return Rows(values.bfloat16().float(), None)
    codes, scales = reference.quantize(values)
    return Rows(decode_e4m3(codes), scales)


def routes_of(expert_ids: Tensor, num_experts: int) -> RouteTable:
    """The reference's route table of ids [T, K]; slots of no expert are not written."""
    slots = expert_ids.numel()
    routes = RouteTable(
        torch.full((num_experts + 1,), -7),
        torch.full((slots,), -7),
        torch.zeros(1, dtype=torch.int64),
    )
    ops.path("reference").route_table(expert_ids, num_experts, routes)
    routes.slots[int(routes.offsets[-1]) :] = 2**31 - 1  # an address far away, if it is read
    return routes


def device_routes(routes: RouteTable) -> RouteTable:
    return RouteTable(
        routes.offsets.int().to(DEVICE), routes.slots.int().to(DEVICE), routes.fault.to(DEVICE)
    )


@dataclass
class Experts:
    """One call: ids [T, K] over `weights` (gate and up, or down)."""

    weights: tuple[PackedWeight, ...]
    rows: Rows
    expert_ids: Tensor
    routing_weights: Tensor | None = None
    limit: float | None = None

    @property
    def routes(self) -> RouteTable:
        return routes_of(self.expert_ids, self.weights[0].num_experts)

    def gate_up(self, tile: Tile = TILE, launches: int = 1) -> Tensor:
        """h [S, I] of the Triton path, on the CPU; slots of no expert keep SENTINEL."""
        scaled = self.rows.scales is not None
        h = self._filled(torch.float32 if scaled else torch.bfloat16)
        weights = None if self.routing_weights is None else self.routing_weights.to(DEVICE)
        gate, up = (prepare(on_device(weight)) for weight in self.weights)
        name = architecture(h.device)
        given = (device_rows(self.rows), (gate, up), device_routes(self.routes))
        if launches == 1:
            gate_up.launch(*given, (weights, self.limit), h, tile, name).run()
            return h.cpu()
        sums = h if scaled else torch.full_like(h, float("nan"), dtype=torch.float32)
        for part in gate_up.launches(*given, (weights, self.limit), (sums, h), tile, name):
            part.run()
        return h.cpu()

    def gate_up_reference(self) -> Tensor:
        """The same in float32."""
        h = torch.full((self.expert_ids.numel(), self.weights[0].rows), SENTINEL)
        given = (self.rows, self.weights, self.routes, self.routing_weights, self.limit)
        ops.path("reference").gate_up(*given, h)
        return h

    def down(self, rounded: bool, tile: Tile = TILE) -> Tensor:
        """Slots [S, H] of the Triton path, on the CPU."""
        slots = self._filled(torch.bfloat16 if rounded else torch.float32)
        weight, routes = prepare(on_device(self.weights[0])), device_routes(self.routes)
        name = architecture(slots.device)
        down.launch(device_rows(self.rows), weight, routes, rounded, slots, tile, name).run()
        return slots.cpu()

    def down_reference(self, numerics) -> Tensor:
        slots = torch.full((self.expert_ids.numel(), self.weights[0].rows), SENTINEL)
        ops.path("reference").down(self.rows, self.weights[0], self.routes, numerics, slots)
        return slots

    def _filled(self, dtype: torch.dtype) -> Tensor:
        shape = (self.expert_ids.numel(), self.weights[0].rows)
        return torch.full(shape, SENTINEL, dtype=dtype, device=DEVICE)


def dense(
    x: Tensor,
    weights: tuple[PackedWeight, PackedWeight, PackedWeight],
    limit: float | None = None,
    tile: Tile = TILE,
) -> tuple[Tensor, Tensor]:
    """(h bfloat16 [T, I], out float32 [T, H]) of the Triton path, on the CPU; x bfloat16 [T, H]."""
    h = _filled_rows(x, weights[0].rows, torch.bfloat16)
    out = _filled_rows(x, weights[2].rows, torch.float32)
    for launch in _dense_launches(x, weights, limit, h, out, tile):
        launch.run()
    return h.cpu(), out.cpu()


def dense_gate_up(x: Tensor, gate: PackedWeight, up: PackedWeight, limit: float) -> Tensor:
    """The first launch alone: h bfloat16 [T, I]."""
    h, out = _filled_rows(x, gate.rows, torch.bfloat16), _filled_rows(x, 1, torch.float32)
    last = PackedWeight("bf16", torch.zeros(1, 1, gate.rows, dtype=torch.bfloat16))
    launch, _ = _dense_launches(x, (gate, up, last), limit, h, out, TILE)
    launch.run()
    return h.cpu()


def dense_down(h: Tensor, weight: PackedWeight) -> Tensor:
    """The second launch alone: h bfloat16 [T, I] -> float32 [T, H]."""
    inner = PackedWeight("bf16", torch.zeros(1, h.shape[1], 16, dtype=torch.bfloat16))
    x = torch.zeros(len(h), 16, dtype=torch.bfloat16)
    out = _filled_rows(h, weight.rows, torch.float32)
    _, launch = _dense_launches(x, (inner, inner, weight), None, h.to(DEVICE), out, TILE)
    launch.run()
    return out.cpu()


def _filled_rows(like: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.full((len(like), columns), SENTINEL, dtype=dtype, device=DEVICE)


def _dense_launches(x, weights, limit, h, out, tile) -> tuple[Launch, Launch]:
    prepared = tuple(prepare(on_device(weight)) for weight in weights)
    given = (x.to(DEVICE), prepared, limit, h, out, tile, architecture(h.device))
    return dense_mlp.launches(*given)
