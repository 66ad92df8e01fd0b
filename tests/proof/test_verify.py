"""verify finds and names a planted fault in each dimension, and passes what is right."""

import pytest
import torch

import faulty_layers as faults
from exactmoe import env
from exactmoe.errors import BitMismatch, ConfigError
from exactmoe.proof import WIDTHS, verify
from exactmoe.proof.dimensions import DIMENSIONS
from exactmoe.proof.dimensions.levers import SETTINGS
from faulty_layers import ELEMENT, faulty
from small_layers import small_dense, small_layer

QUICK = (1, 2, 8, 9, 17, 65)
# Of a GPU, or of several processes, only; a report says why each has not run.
NOT_HERE = {"callers", "streams", "captured", "tiles", "levers", "stages", "ranks"}

# Fault, the dimension that must name it, part of the case, width and token of the first difference.
PLANTED = [
    (faults.Width, "width", "block", 9, 0),
    (faults.Position, "position", "block", 9, 8),
    # Token 1: at place 0 neither needle is smaller than its one neighbour.
    (faults.OneScaleForAll, "neighbours", "random neighbours", 2, 1),
    (faults.LeakingNan, "neighbours", "NaN neighbours", 2, 0),
    (faults.ForeignNan, "position", "block", 9, 8),
    (faults.MinusZero, "position", "block", 9, 8),
    (faults.PairOrder, "order", "experts: pairs reversed", 1, 0),
    (faults.Repeat, "repeats", "block", 1, 0),
    (faults.Piece, "pieces", "max_rows 1", 65, 0),
    (faults.OldWorkspace, "memory", "workspace of bytes 0xFF", 1, 0),
    (faults.ResultInWorkspace, "repeats", "y of the first call", 1, 0),
    (faults.Stride, "strides", "views of wider memory", 9, 0),
    (faults.Threads, "threads", "3 threads", 1, 0),
    (faults.Backend, "backend", "cpu against reference", 2, 0),
    (faults.WritesInputs, "inputs", "x after the call", 1, 0),
]
ONE_BIT = (faults.Width, faults.Position, faults.Piece, faults.Threads)


@pytest.mark.parametrize(("fault", "dimension", "case", "width", "token"), PLANTED)
def test_planted_fault(rng, fault, dimension, case, width, token):
    report = verify(faulty(small_layer(rng), fault), widths=QUICK, repeats=12)
    assert not report.ok
    named = {d.dimension: d for d in report.differences}
    assert next(iter(named)) == dimension
    first = named[dimension]
    assert case in first.case
    assert (first.width, first.token) == (width, token)
    if fault in ONE_BIT:
        assert first.element == ELEMENT
        assert int(first.expected_bits, 16) ^ int(first.found_bits, 16) == 1
    with pytest.raises(
        BitMismatch, match=rf"width {width}, token {token}, element {first.element}"
    ):
        report.raise_on_mismatch()


def test_planted_fault_in_one_size_of_chunk(rng):
    report = verify(faulty(small_dense(rng), faults.OddChunk), widths=(300,), repeats=1)
    (first,) = report.differences
    assert (first.dimension, first.width, first.token) == ("chunks", 44, 0)
    assert first.case == "dense: 300 tokens by 64, from token 256"


@pytest.mark.parametrize("fault", [faults.UnwrittenRow, faults.ResultInWorkspace])
def test_planted_fault_in_memory(rng, fault):
    report = verify(faulty(small_layer(rng), fault), dimensions=["memory"])
    assert [difference.dimension for difference in report.differences] == ["memory"]


@pytest.mark.parametrize("fault", [faults.Width, faults.Position, faults.OneScaleForAll])
def test_planted_fault_dense(rng, fault):
    report = verify(faulty(small_dense(rng), fault), widths=QUICK, repeats=2)
    names = {fault: (dimension, width) for fault, dimension, _, width, _ in PLANTED}
    first = report.differences[0]
    assert (first.dimension, first.width) == names[fault]
    assert first.case.startswith("dense")


def test_foreign_nan_is_named_by_bits(rng):
    report = verify(
        faulty(small_layer(rng), faults.ForeignNan), widths=(9,), dimensions=["position"]
    )
    first = report.differences[0]
    assert (first.expected, first.found) == ("nan", "nan")
    assert (first.expected_bits, first.found_bits) == ("0x7FC0", "0x7FC1")


def test_minus_zero_is_named_by_bits(rng):
    report = verify(
        faulty(small_layer(rng), faults.MinusZero), widths=(9,), dimensions=["position"]
    )
    first = report.differences[0]
    assert (first.expected_bits, first.found_bits) == ("0x0000", "0x8000")
    assert report.dimensions["position"].mismatches == 3 * 2  # needles x entries, one row each


LAYERS = [
    ("score", "a16", "nvfp4"),
    ("hash", "a16", "mxfp4"),
    ("score", "a8", "mxfp4"),
    ("hash", "a8", "mxfp4"),
    ("bare", "a8", "nvfp4"),
]


@pytest.mark.parametrize(("kind", "numerics", "format"), LAYERS)
def test_every_width(rng, kind, numerics, format):
    layer = small_layer(rng, kind, numerics, format)
    before = (layer.limits, layer.backend, torch.get_num_threads())
    report = verify(layer, repeats=3)
    report.raise_on_mismatch()
    assert report.ok
    assert set(report.dimensions) == {"inputs", *DIMENSIONS} - NOT_HERE
    assert set(report.not_run) == NOT_HERE
    assert (layer.limits, layer.backend, torch.get_num_threads()) == before
    entries = 1 if kind == "bare" else 2
    assert report.dimensions["width"].comparisons == entries * 3 * len(WIDTHS)
    assert report.dimensions["position"].comparisons == entries * 3 * sum(w - 1 for w in WIDTHS)
    assert report.dimensions["repeats"].comparisons == entries * 4 * (1 + 5 + 64)


def test_two_hundred_repeats(rng):
    report = verify(small_layer(rng), repeats=200, dimensions=["repeats"])
    report.raise_on_mismatch()
    assert report.dimensions["repeats"].comparisons == 2 * 201 * (1 + 5 + 64)


def test_dense(rng):
    report = verify(small_dense(rng))
    assert report.ok
    assert set(report.dimensions) == {"inputs", *DIMENSIONS} - NOT_HERE - {"order", "cards"}


def test_bytes_are_counted(rng):
    report = verify(small_dense(rng), widths=(1, 4), dimensions=["width"])
    assert report.dimensions["width"].nbytes == 3 * 2 * 64 * 2  # needles, widths, H, bf16
    assert report.nbytes == report.dimensions["width"].nbytes + report.dimensions["inputs"].nbytes


def test_seed_changes_the_inputs(rng):
    layer = faulty(small_dense(rng), faults.Width)
    found = [verify(layer, seed=s, widths=(9,), dimensions=["width"]) for s in (0, 0, 1)]
    values = [report.differences[0].found for report in found]
    assert values[0] == values[1] != values[2]


def test_wrong_shape_or_dtype_of_y(rng):
    layer = small_dense(rng)
    layer.forward = lambda x, out=None: torch.zeros(x.shape[0], 64)
    with pytest.raises(BitMismatch, match=r"y is torch.float32 \(1, 64\); allowed: torch.bfloat16"):
        verify(layer)


REFUSED = [
    ({"widths": ()}, r"widths are \(\)"),
    ({"widths": (0, 3)}, r"widths are \(0, 3\)"),
    ({"widths": "9"}, r"widths are \('9',\); allowed: at least one, each an integer"),
    ({"dimensions": ["with"]}, r"dimensions \['with'\] do not exist; allowed: repeats, width"),
    ({"repeats": 0}, "repeats is 0"),
    ({"backend_rows": 0}, "backend_rows 0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(rng, arguments, message):
    with pytest.raises(ConfigError, match=message):
        verify(small_dense(rng), **arguments)


def test_no_layer():
    with pytest.raises(ConfigError, match="layer is Linear; allowed: MoELayer, DenseMLP"):
        verify(torch.nn.Linear(2, 2))


def test_levers_are_switches_away_from_their_default():
    for name, text in SETTINGS:
        with env.forced(name, text):
            assert env.changed() == {name: env.read(name)}
        assert env.changed() == {}


def test_nothing_that_can_run_is_no_proof(rng):
    report = verify(small_dense(rng), dimensions=["captured"])
    assert report.not_run == {"captured": "cpu has no CUDA graphs"}
    assert not report.ok
    with pytest.raises(BitMismatch, match="nothing was compared"):
        report.raise_on_mismatch()


def test_progress_names_what_runs(rng):
    said = []
    verify(small_layer(rng), widths=(1,), dimensions=["width"], subject="it", progress=said.append)
    assert said == ["it: block, width", "it: experts, width"]
