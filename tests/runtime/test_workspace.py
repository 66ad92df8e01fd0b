"""The arena grows by reserve only, and its views are sized by a closed form."""

import pytest
import torch

from exactmoe import DenseMLP, Limits, Router, RouterConfig, ops
from exactmoe.errors import ConfigError
from exactmoe.runtime.workspace import ALIGNMENT, Arena, Region, arena, total_bytes
from layers import BACKENDS, CLASSES, assert_same_bits, layer_of, normal, random_bank, random_call

CPU = torch.device("cpu")
REGIONS = [
    Region("ids", (3, 5), torch.int32),
    Region("empty", (0, 7), torch.float32),
    Region("values", (5, 7), torch.float32),
    Region("bytes", (1,), torch.uint8),
    Region("wide", (9,), torch.int64),
]


def test_bytes_are_the_closed_form():
    assert [r.nbytes for r in REGIONS] == [64, 0, 192, 64, 128]
    assert total_bytes(REGIONS) == 448
    assert total_bytes([]) == 0


def test_views_lie_side_by_side_and_aligned():
    held = Arena(CPU)
    held.reserve(total_bytes(REGIONS))
    views = held.views(REGIONS)
    start = views["ids"].data_ptr()
    assert [views[r.name].data_ptr() - start for r in REGIONS if r.name != "empty"] == [
        0,
        64,
        256,
        320,
    ]
    for region in REGIONS:
        view = views[region.name]
        assert (tuple(view.shape), view.dtype) == (region.shape, region.dtype)
        assert view.is_contiguous()
        view.fill_(1)
    for region in REGIONS:
        assert (views[region.name] == 1).all()
    assert ALIGNMENT == 64


def test_it_grows_when_asked_and_never_shrinks():
    held = Arena(CPU)
    assert held.nbytes == 0
    held.reserve(100)
    assert held.nbytes == 100
    generation, views = held.generation, held.views(REGIONS[:1])
    held.reserve(50)
    held.reserve(100)
    assert (held.nbytes, held.generation) == (100, generation)
    held.reserve(101)
    assert held.nbytes == 101
    assert held.generation != generation
    assert views["ids"].untyped_storage().data_ptr() == generation  # old views keep their memory


def test_views_that_need_more_than_was_reserved_are_refused():
    held = Arena(CPU)
    held.reserve(447)
    with pytest.raises(ConfigError, match="holds 447 bytes and 448 are needed"):
        held.views(REGIONS)


def test_fill_makes_every_float_a_nan():
    held = Arena(CPU)
    held.reserve(total_bytes(REGIONS))
    held.fill(0xFF)
    assert held.views(REGIONS)["values"].isnan().all()


def test_one_arena_a_device():
    assert arena(CPU) is arena(torch.device("cpu"))
    assert arena(CPU) is not arena(torch.device("meta"))


def make(rng, backend="cpu", numerics="a16", **settings):
    router = Router(normal(rng, 6, 128), config=RouterConfig(score="sigmoid"))
    sizes = ((64, 128), (64, 128), (128, 64))
    shared = DenseMLP(*(normal(rng, *size, scale=0.1) for size in sizes), backend=backend)
    bank = random_bank(rng, "mxfp4", 6, 128, 128)
    return layer_of(bank, 2, backend, numerics=numerics, router=router, shared=shared, **settings)


@pytest.mark.parametrize("numerics", CLASSES)
def test_workspace_bytes_of_a_layer(numerics, rng):
    layer = make(rng, numerics=numerics)

    def padded(numbers: int, size: int = 4) -> int:
        return -(-numbers * size // 64) * 64

    for rows in (1, 5, 512):
        slots = 2 * rows
        expected = padded(rows * 128) + padded(slots, 8) + padded(rows, 8) + 2 * padded(slots)
        expected += padded(rows * 6) + padded(7, 8) + padded(slots, 8) + 2 * padded(slots * 128)
        if numerics == "a8":
            expected += padded(rows * 128) + padded(rows) + padded(slots * 128) + padded(slots)
        expected += padded(rows * 64) + padded(rows * 128)
        assert layer.workspace_bytes(rows) == expected
    assert layer.workspace_bytes() == layer.workspace_bytes(512)
    assert arena(CPU).nbytes >= layer.workspace_bytes()


def test_names_of_regions_are_distinct(rng):
    names = [region.name for region in make(rng, numerics="a8").regions(4, ops.DECODED)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_never_grows_the_arena(backend, rng):
    layer = make(rng, backend, limits=Limits(max_rows=3))
    x, ids, weights = random_call(rng, layer, 9)
    before = arena(CPU).generation, arena(CPU).nbytes
    layer(x)
    layer.experts(x, ids, weights)
    layer.shared(x)
    assert (arena(CPU).generation, arena(CPU).nbytes) == before


def test_layers_notice_that_the_arena_has_grown(rng):
    layer = make(rng, limits=Limits(max_rows=4))
    x = normal(rng, 9, 128)
    expected = layer(x)
    generation = arena(CPU).generation
    arena(CPU).reserve(arena(CPU).nbytes + 1)
    assert arena(CPU).generation != generation
    arena(CPU).fill(0xFF)
    assert_same_bits(layer(x), expected)
    used = arena(CPU).views(layer.regions(4, ops.DECODED))["x"]
    assert_same_bits(used[:1], x[8:].float())  # the last piece was staged in the new memory
    layer.reserve(9)
    assert_same_bits(layer(x), expected)


def test_a_layer_made_in_inference_mode_runs_outside_of_it(rng):
    x = normal(rng, 3, 128)
    with torch.inference_mode():
        layers = [make(rng.manual_seed(1), backend) for backend in BACKENDS]
        arena(CPU).reserve(arena(CPU).nbytes + 1)
        expected = layers[0](x).clone()
    _, ids, weights = random_call(rng, layers[0], 3)
    ids[1, 1] = 6
    for layer in layers:
        assert_same_bits(layer(x).clone(), expected)
        layer.experts(x, ids, weights)
        with pytest.raises(ConfigError, match="num_experts = 6"):
            layer.check()
        layer.check()
