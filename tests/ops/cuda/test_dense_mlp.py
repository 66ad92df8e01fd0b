"""What is launched for a dense bf16 MLP on sm_90: kernels, grids, tensor maps and arguments.
Nothing runs: the kernel and the driver are fakes that keep them, and tensors are on the CPU.
"""

import ctypes
import importlib
import re
from importlib.resources import files
from math import inf
from types import SimpleNamespace

import pytest
import torch

from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.kernels.cuda.tensor_map import TensorMap
from exactmoe.ops.cuda import dense_mlp
from exactmoe.ops.cuda_path import CudaPath
from exactmoe.ops.triton.prepare import prepare
from exactmoe.ops.triton_path import TritonPath
from exactmoe.plan import Plan, WeightShape, mlp_tiles_of
from exactmoe.plan.dense_tiles import DENSE_TILES

STREAM, PROCESSORS = 77, 132
C_TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "float": ctypes.c_float}


def parameters() -> dict[str, type]:
    """Names and types of the kernel's parameters, from its source."""
    source = (files("exactmoe.kernels.cuda") / "dense.cu").read_text()
    (text,) = re.findall(r"^dense\((.*?)\) \{", source, re.M | re.S)
    found = {}
    for parameter in text.split(","):
        kind, name = parameter.strip().rsplit(" ", 1)
        is_map = kind == "const __grid_constant__ TensorMap"
        found[name] = (
            TensorMap if is_map else ctypes.c_void_p if kind.endswith("*") else C_TYPES[kind]
        )
    return found


@pytest.fixture
def launched(monkeypatch) -> list[SimpleNamespace]:
    found, maps = [], {}

    def rows_map(*arguments):
        made = TensorMap()
        made.words[0] = len(maps)
        maps[len(maps)] = arguments
        return made

    def kernel(variant):
        def launch(device, stream, grid, arguments, early):
            assert stream == STREAM and early
            known = parameters()
            assert [type(argument) for argument in arguments] == list(known.values())
            values = [maps[a.words[0]] if isinstance(a, TensorMap) else a.value for a in arguments]
            named = dict(zip(known, values, strict=True))
            found.append(SimpleNamespace(variant=variant, grid=grid, arguments=named))

        return SimpleNamespace(launch=launch, most_clusters=lambda *arguments: 32)

    monkeypatch.delenv("EXACTMOE_TILE", raising=False)
    monkeypatch.setattr(dense_mlp, "kernel", kernel)
    monkeypatch.setattr(dense_mlp, "rows_map", rows_map)
    monkeypatch.setattr(dense_mlp, "_processors", lambda device: PROCESSORS)
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    dense_mlp._most_clusters.cache_clear()
    yield found
    dense_mlp._most_clusters.cache_clear()


def bf16(rows, columns):
    return prepare(PackedWeight("bf16", torch.zeros(1, rows, columns, dtype=torch.bfloat16)))


def problem(tokens, hidden=4096, inner=2048):
    weights = (bf16(inner, hidden), bf16(inner, hidden), bf16(hidden, inner))
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    h = torch.empty(tokens, inner, dtype=torch.bfloat16)
    return x, weights, h, torch.empty(tokens, hidden)


def test_one_token(launched):
    x, weights, h, out = problem(1)
    dense_mlp.dense_mlp(x, weights, 1.5, h, out)
    gate, up, down = (weight.weight.codes.data_ptr() for weight in weights)
    first, second = launched
    assert (first.variant.op, second.variant.op) == ("gate_up", "down")
    for one in launched:
        assert (one.variant.rows, one.variant.tokens, one.variant.blocks) == (32, 8, 2)
        assert one.grid == (128, 1, 256)
    assert first.arguments == {
        "first_map": (gate, (2048, 4096), 4096, 8, 2),
        "second_map": (up, (2048, 4096), 4096, 8, 2),
        "token_map": (x.data_ptr(), (1, 4096), 4096, 8, 2),
        "values": h.data_ptr(),
        "stride": 2048,
        "num_tokens": 1,
        "span": 8,
        "rows": 2048,
        "k": 4096,
        "limit": 1.5,
    }
    assert second.arguments == {
        "first_map": (down, (4096, 2048), 2048, 32, 2),
        "second_map": (down, (4096, 2048), 2048, 32, 2),
        "token_map": (h.data_ptr(), (1, 2048), 2048, 8, 2),
        "values": out.data_ptr(),
        "stride": 4096,
        "num_tokens": 1,
        "span": 8,
        "rows": 4096,
        "k": 2048,
        "limit": 0.0,
    }


def test_no_limit_is_a_clamp_at_infinity(launched):
    x, weights, h, out = problem(1, 64, 64)
    dense_mlp.dense_mlp(x, weights, None, h, out)
    assert launched[0].arguments["limit"] == inf


def test_k_above_4096_is_segmented(launched):
    x, weights, h, out = problem(1, 64, 4160)
    dense_mlp.dense_mlp(x, weights, None, h, out)
    assert [one.variant.segmented for one in launched] == [False, True]


@pytest.mark.parametrize("tokens", [1, 17, 64, 300, 4096])
@pytest.mark.parametrize("inner", [320, 2048, 12288])
def test_boxes_fill_a_stage_and_the_grid_takes_every_item(launched, tokens, inner):
    x, weights, h, out = problem(tokens, 256, inner)
    dense_mlp.dense_mlp(x, weights, None, h, out)
    for one in launched:
        variant, arguments = one.variant, one.arguments
        copies = variant.rows // 8 if variant.op == "gate_up" else 1
        pieces = variant.tokens // variant.piece
        shared = 1 if variant.cluster == 1 else pieces * variant.chunks
        boxes = [arguments["first_map"][3:]] * copies + [arguments["token_map"][3:]] * shared
        assert sum(128 * rows * chunks for rows, chunks in boxes) == variant.stage_bytes
        blocks, _, threads = one.grid
        assert threads == variant.threads
        assert blocks % variant.cluster == 0 and 0 < blocks <= PROCESSORS
        items = -(-arguments["rows"] // (variant.features * variant.cluster))
        span = arguments["span"]
        assert 0 < span <= variant.tokens and pieces % variant.cluster == 0
        items *= -(-tokens // span)
        clusters = blocks // variant.cluster
        rounds = -(-items // clusters)
        # No fewer rounds with all multiprocessors, and no fewer blocks in as many rounds: but all
        # where a last token tile has less work.
        most = PROCESSORS if variant.cluster == 1 else min(PROCESSORS // variant.cluster, 32)
        assert rounds == -(-items // most)
        if span < tokens and 0 < 2 * (tokens % span) <= span:
            assert clusters == min(items, most)
        else:
            assert (clusters - 1) * rounds < items


@pytest.mark.parametrize("tile", DENSE_TILES, ids=lambda tile: f"{tile} b{tile.blocks}")
def test_shared_memory_holds_three_stages_and_both_blocks(tile):
    for columns in (4096, 12288):
        pair = [dense_mlp.variant_of(op, columns, tile) for op in ("gate_up", "down")]
        assert all(3 <= variant.stages <= 12 for variant in pair)
        assert all(variant.shared_bytes <= 232448 for variant in pair)
        if all(variant.blocks == 2 for variant in pair):
            assert sum(variant.shared_bytes + 1024 for variant in pair) <= 233472


def test_no_tokens_launch_nothing(launched):
    dense_mlp.dense_mlp(*problem(0)[:2], None, *problem(0)[2:])
    assert launched == []


def test_gate_up_alone(launched):
    x, weights, h, _ = problem(1)
    dense_mlp.dense_gate_up(x, weights[:2], 1.5, h)
    assert [one.variant.op for one in launched] == ["gate_up"]


def wider(rows: int, columns: int, more: int = 4) -> torch.Tensor:
    """[rows, columns] whose rows are `more` elements further apart."""
    return torch.zeros(rows, columns + more, dtype=torch.bfloat16)[:, :columns]


def shifted(rows: int, columns: int, elements: int) -> torch.Tensor:
    """[rows, columns] that begins `elements` behind a multiple of 16 bytes."""
    memory = torch.zeros(rows * columns + elements, dtype=torch.bfloat16)
    return memory[elements:].view(rows, columns)


def one_expert(matrix: torch.Tensor):
    return prepare(PackedWeight("bf16", matrix[None]))


FP8 = PackedWeight("fp8", torch.zeros(1, 192, 128, dtype=torch.uint8), torch.ones(1, 2, 1))
GATES = {
    "taken": bf16(192, 128),
    "rows far apart": one_expert(wider(192, 128, 8)),
    "fp8": prepare(FP8),
    "rows at odd places": one_expert(wider(192, 128)),
    "begins at an odd place": one_expert(shifted(192, 128, 4)),
}


@pytest.mark.parametrize("name", GATES)
def test_the_weights_alone_choose_the_kernel_and_explain_names_it(name, launched, monkeypatch):
    """One rule for the plan and the op: what `mlp_tiles_of` says is what is launched."""
    portable = []
    for op in ("dense_mlp", "dense_gate_up"):
        monkeypatch.setattr(TritonPath, op, lambda *given: portable.append(given))
    x, (_, up, down), h, out = problem(3, 128, 192)
    weights, path = (GATES[name], up, down), CudaPath()
    path.dense_mlp(x, weights, None, h, out)
    path.dense_gate_up(x, weights[:2], None, h)
    taken = name in ("taken", "rows far apart")
    assert (len(launched), len(portable)) == ((3, 0) if taken else (0, 2))
    shapes = tuple(WeightShape.of(w.format, w.weight.codes) for w in weights)
    explain = importlib.import_module("exactmoe.plan.explain")
    monkeypatch.setattr(explain, "architecture_name", lambda device: "sm_90")
    plan = Plan("cuda", "cuda:0", "")
    kernels = {choice.kernel for choice in mlp_tiles_of(plan, shapes, 3)}
    assert kernels == {"kernels/cuda/dense.cu" if taken else "kernels/triton/dense_mlp.py"}


def test_one_row_is_read_wherever_a_next_one_would_be(launched):
    """A row that is cut out of a wider tensor is contiguous, with any stride."""
    _, weights, h, out = problem(1, 128, 192)
    x = wider(1, 128)
    assert x.is_contiguous() and x.stride(0) == 132
    CudaPath().dense_mlp(x, weights, None, h, out)
    assert [one.variant.op for one in launched] == ["gate_up", "down"]
    assert launched[0].arguments["token_map"][:3] == (x.data_ptr(), (1, 128), 128)


ROWS = [
    ("x", shifted(3, 128, 4), "x begins 8 bytes behind a multiple of 16"),
    ("x", wider(3, 128), r"the rows of x are 264 bytes apart"),
    ("x", torch.zeros(128, 3, dtype=torch.bfloat16).T, r"x has strides \(1, 3\)"),
    ("h", wider(3, 192), "the rows of h are 392 bytes apart"),
    ("out", torch.zeros(3, 129)[:, :128], "the rows of out are 516 bytes apart"),
]


@pytest.mark.parametrize(("name", "rows", "reason"), ROWS)
def test_rows_that_tensor_copies_cannot_reach_are_refused(name, rows, reason, launched):
    """A workspace and `Space.staged` never give such; no other kernel is taken silently."""
    x, weights, h, out = problem(3, 128, 192)
    given = {"x": x, "h": h, "out": out, name: rows}
    with pytest.raises(Unsupported, match=reason):
        CudaPath().dense_mlp(given["x"], weights, None, given["h"], given["out"])
    assert launched == []
