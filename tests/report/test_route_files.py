"""Traces as files: both kinds give the trace back; those of other programs are read or refused."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.report.route_files import Facts
from exactmoe.report.route_trace import LayerRoutes, RouteTrace

KINDS = ("npz", "parquet")


def trace():
    rng = np.random.default_rng(0)
    layers = {}
    for layer, (experts, top_k, count) in {3: (8, 2, 50), 7: (40000, 5, 20)}.items():
        ids = rng.integers(-1, experts, (count, top_k)).astype(np.int32)
        steps = np.arange(count) // 4
        layers[layer] = LayerRoutes(
            experts, layer == 7, steps, np.arange(count) % 4, ids, lost=layer
        )
    return RouteTrace(layers)


def assert_same(found, expected):
    assert list(found.layers) == list(expected.layers)
    for layer, routes in expected.layers.items():
        other = found.layers[layer]
        facts = ("num_experts", "is_hashed", "lost", "top_k")
        assert [getattr(other, f) for f in facts] == [getattr(routes, f) for f in facts]
        assert other.expert_ids.dtype == np.int32
        for part in ("steps", "tokens", "expert_ids"):
            assert np.array_equal(getattr(other, part), getattr(routes, part))
            assert getattr(other, part).dtype in (np.int64, np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_back_the_trace(kind, tmp_path):
    path = tmp_path / f"routes.{kind}"
    trace().save(path)
    assert_same(RouteTrace.load(path), trace())


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_out_of_range_stay_so(kind, tmp_path):
    ids = np.array([[-9, 4], [70000, 0]], dtype=np.int32)
    routes = LayerRoutes(4, False, np.zeros(2, np.int64), np.arange(2), ids)
    RouteTrace({0: routes}).save(tmp_path / f"t.{kind}")
    found = RouteTrace.load(tmp_path / f"t.{kind}").layers[0].expert_ids
    present = (found >= 0) & (found < 4)
    assert present.tolist() == [[False, False], [False, True]]
    assert found[1, 1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_tokens(kind, tmp_path):
    none = np.zeros(0, dtype=np.int64)
    routes = LayerRoutes(4, False, none, none, np.zeros((0, 2), np.int32), lost=5)
    RouteTrace({2: routes}).save(tmp_path / f"t.{kind}")
    found = RouteTrace.load(tmp_path / f"t.{kind}").layers[2]
    assert (len(found.steps), found.num_experts, found.lost) == (0, 4, 5)


def foreign(path, **changed):
    """A file of another program: unordered layers, narrow integers, no facts."""
    columns = {
        "layer": pa.array([5, 2, 5, 2], pa.int16()),
        "step": pa.array([0, 0, 1, 1], pa.uint8()),
        "token": pa.array([0, 0, 0, 0], pa.int32()),
        "expert_ids": pa.array([[1, 2], [3], [0, 1], [2]], pa.list_(pa.uint8())),
        "prompt": pa.array(list("abcd")),
    } | changed
    pq.write_table(pa.table({name: c for name, c in columns.items() if c is not None}), path)
    return path


FACTS = {2: Facts(4, False), 5: Facts(3, True), 9: Facts(8, False)}


def test_a_file_of_another_program(tmp_path):
    path = foreign(tmp_path / "t.parquet")
    found = RouteTrace.load(path, FACTS)
    assert list(found.layers) == [5, 2]
    assert found.layers[5].expert_ids.tolist() == [[1, 2], [0, 1]]
    assert found.layers[2].expert_ids.tolist() == [[3], [2]]
    assert found.layers[5].steps.tolist() == [0, 1]
    assert (found.layers[5].is_hashed, found.layers[2].num_experts) == (True, 4)
    with pytest.raises(CheckpointError, match=r"not say how many experts layers \[2\] have"):
        RouteTrace.load(path, {5: FACTS[5]})


def test_many_row_groups_and_chunks(tmp_path):
    ids = np.arange(600, dtype=np.int32).reshape(200, 3) % 7
    table = pa.table(
        {
            "layer": np.repeat([1, 2], 100),
            "step": np.arange(200),
            "token": np.zeros(200, np.int64),
            "expert_ids": pa.array(ids.tolist(), pa.list_(pa.int64(), 3)),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=30)
    found = RouteTrace.load(tmp_path / "t.parquet", {1: Facts(7, False), 2: Facts(7, False)})
    assert found.layers[1].expert_ids.tolist() == ids[:100].tolist()
    assert found.layers[2].expert_ids.tolist() == ids[100:].tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token": None}, "no trace of routes"),
        ({"expert_ids": pa.array([[1], [2], [1, 2], [2]])}, "layer 5 has lists of different"),
        ({"expert_ids": pa.array([[], [2], [], [2]], pa.list_(pa.int8()))}, "different lengths"),
        ({"expert_ids": pa.array([[1, None], [3], [0, 1], [2]])}, "a value is missing"),
        ({"step": pa.array([0, None, 1, 1])}, "a value is missing"),
        ({"expert_ids": pa.array([[0.5], [1.0], [1.0], [2.0]])}, "no trace of routes"),
    ],
)
def test_refused_files(changed, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        RouteTrace.load(foreign(tmp_path / "t.parquet", **changed), FACTS)


def test_no_file_at_all_and_other_endings(tmp_path):
    for kind in KINDS:
        path = tmp_path / f"t.{kind}"
        with pytest.raises(CheckpointError, match="no trace of routes"):
            RouteTrace.load(path)
        path.write_bytes(b"junk")
        with pytest.raises(CheckpointError, match="no trace of routes"):
            RouteTrace.load(path)
    for use in (trace().save, RouteTrace.load):
        with pytest.raises(ConfigError, match=r"ends with '.csv'; allowed: .npz, .parquet"):
            use(tmp_path / "t.csv")


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unsupported, match=r"pip install 'exactmoe\[trace\]'"):
        trace().save(tmp_path / "t.parquet")
