"""What a trace says: numbers counted by hand, and the placement file."""

import json
import math

import numpy as np
import pytest
import torch

from exactmoe.bank import busiest
from exactmoe.bank.partition import Partition
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.report import route_load as load
from exactmoe.report import route_pictures as pictures
from exactmoe.report.route_page import examine, require_examinable, write
from exactmoe.report.route_trace import LayerRoutes, RouteTrace


def routes(ids, num_experts=4):
    ids = np.array(ids, dtype=np.int32)
    count = len(ids)
    return LayerRoutes(num_experts, False, np.zeros(count, np.int64), np.arange(count), ids)


def skewed(tokens=64):
    """Tokens choose experts (0, 1) or (2, 3): on even cards one of them has everything."""
    return RouteTrace({1: routes([[0, 1], [2, 3]] * (tokens // 2))})


def test_loads_of_runs_of_tokens():
    found = routes([[0, 1], [1, 3], [-1, 4], [2, 2], [0, 0]])
    assert load.loads(found).tolist() == [
        [1, 1, 0, 0],
        [0, 1, 0, 1],
        [0, 0, 0, 0],
        [0, 0, 2, 0],
        [2, 0, 0, 0],
    ]
    assert load.loads(found, 2).tolist() == [[1, 2, 0, 1], [0, 0, 2, 0]]
    assert load.relative_load(found).tolist() == [1.5, 1.0, 1.0, 0.5]
    assert load.relative_load(routes([[-1, -1]])).tolist() == [0, 0, 0, 0]


def test_union_of_consecutive_tokens():
    found = routes([[0, 1], [1, 2], [2, 3]])
    assert load.unions(found, 3) == [2, 3, 4]
    assert math.isnan(load.unions(found, 4)[3])
    assert load.uniform_union(4, 2, 1) == 2
    assert load.uniform_union(4, 2, 2) == 3
    assert load.uniform_union(4, 4, 9) == 4


def test_uniform_routing_meets_the_uniform_curve():
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4000, 16)), axis=1)[:, :4]
    for width in (1, 2, 8):
        found = load.unions(routes(ids, 16))[width - 1]
        assert found == pytest.approx(load.uniform_union(16, 4, width), rel=0.01)


def slowly(ids, num_experts, width):
    """Distinct experts of all windows, one by one."""
    windows = [ids[first : first + width] for first in range(len(ids) - width + 1)]
    return np.mean(
        [len({e for e in w.flatten().tolist() if 0 <= e < num_experts}) for w in windows]
    )


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 18, 200])
def test_unions_are_those_that_are_counted_window_by_window(tokens):
    """Also at the ends of a trace, with absent experts, and with ids that repeat in a token."""
    rng = np.random.default_rng(tokens)
    for num_experts in (3, 40):
        ids = rng.integers(-1, num_experts + 2, (tokens, 3)).astype(np.int32)
        found = load.unions(routes(ids, num_experts))
        for width in range(1, min(tokens, 16) + 1):
            assert found[width - 1] == pytest.approx(slowly(ids, num_experts, width), abs=1e-12)
        assert all(map(math.isnan, found[tokens:]))


def test_loads_and_shares_are_those_of_the_table_of_loads():
    rng = np.random.default_rng(1)
    found = routes(rng.integers(-1, 9, (50, 3)), 8)
    counts = load.loads(found).sum(0)
    assert load.relative_load(found) == pytest.approx(counts * 8 / counts.sum())
    partition = Partition((0, 1, 2, 0, 1, 2, 0, 1))
    shares = load.shares("p", {0: partition}, RouteTrace({0: found}), (1, 4, 7))
    for width, share in shares.by_width.items():
        calls = torch.from_numpy(load.loads(found, width))
        assert share == pytest.approx(busiest(partition, calls) / float(calls.sum(1).mean()))


def test_share_of_the_busiest_card():
    trace = skewed()
    even = load.shares("even", load.even(trace, 2), trace, (1, 2))
    assert even.by_width == {1: 1.0, 2: 0.5}
    mixed = load.shares("mixed", {1: Partition((0, 1, 0, 1))}, trace, (1, 2, 1000))
    assert mixed.by_width == {1: 0.5, 2: 0.5}
    with pytest.raises(ConfigError, match="placement 'x' has no layer 1"):
        load.shares("x", {2: Partition((0, 1, 0, 1))}, trace, (1,))
    with pytest.raises(ConfigError, match="partition is of"):
        load.shares("x", {1: Partition((0, 1))}, trace, (1,))


def test_the_placement_from_loads_is_found_on_one_half_and_measured_on_the_other():
    trace = skewed()
    first, second = load.halves(trace)
    assert first.layers[1].tokens.tolist() == list(range(32))
    assert second.layers[1].tokens.tolist() == list(range(32, 64))
    found = examine(trace, 2)
    named = {part.name: part.by_width[1] for part in found.shares}
    assert named == {"even": 1.0, "by route load": 0.5}
    swapped = RouteTrace({1: routes([[0, 1], [2, 3]] * 16 + [[0, 2], [1, 3]] * 16)})
    learned = load.placed(load.halves(swapped)[0], 2)[1]
    assert learned.owners[0] != learned.owners[1]
    measured = examine(swapped, 2).shares[-1].by_width[1]
    later = load.shares("", {1: learned}, load.halves(swapped)[1], (1,))
    assert measured == later.by_width[1]


def test_too_few_tokens_and_placements_of_other_cards():
    with pytest.raises(ConfigError, match="has 30 tokens in a layer; allowed: from 32"):
        examine(skewed(30), 2)
    with pytest.raises(ConfigError, match=r"placement p is for \[4\] cards, not 2"):
        examine(skewed(), 2, {"p": {1: Partition((0, 1, 2, 3))}})


def test_the_placement_file(tmp_path):
    path = tmp_path / "placement.json"
    placement = {3: Partition((0, 1, 1, 0)), 4: Partition((1, 0, 0, 1))}
    load.write_placement(path, placement)
    assert json.loads(path.read_text())["layers"] == {"3": [0, 1, 1, 0], "4": [1, 0, 0, 1]}
    assert load.read_placement(path) == placement
    for bad, error in {
        "[]": "is no placement",
        '{"format": 1, "layers": {"a": [0]}}': "is no placement",
        '{"format": 2, "layers": {}}': "format is 2; allowed: 1",
    }.items():
        path.write_text(bad)
        with pytest.raises(CheckpointError, match=error):
            load.read_placement(path)
    path.write_text('{"format": 1, "layers": {"1": [0, 2]}}')
    with pytest.raises(ConfigError, match="own no expert"):
        load.read_placement(path)


def test_the_page_holds_its_pictures_and_no_foreign_html(tmp_path):
    trace = skewed()
    found = examine(trace, 2, {"<b>mine</b>": {1: Partition((0, 1, 0, 1))}})
    files = write(tmp_path, "<i>model</i>", found, 2)
    names = ["routes.html", "load.png", "union.png", "cards.png", "placement.json"]
    assert files == [str(tmp_path / name) for name in names]
    text = (tmp_path / "routes.html").read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') == 3
    assert "<h1>Routes of &lt;i&gt;model&lt;/i&gt;</h1>" in text
    for word in ("http://", "https://", "<script", "<i>", "<link"):
        assert word not in text
    for name in names[1:4]:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    placed = load.read_placement(tmp_path / "placement.json")[1].owners
    assert placed[0] != placed[1] and placed[2] != placed[3]


@pytest.mark.parametrize("num_experts", [2, 20, 24, 288])
def test_the_axis_of_experts_has_whole_numbers(monkeypatch, num_experts):
    """matplotlib marked 20 experts at 0, 2.5, 5, ..."""
    monkeypatch.setattr(pictures, "png", lambda figure: figure)
    found = load.Counted.of(routes([[0, 1]] * 64, num_experts))
    ticks = pictures.load_map({1: found}).axes[0].get_xticks()
    assert len(ticks) > 1 and all(tick == int(tick) for tick in ticks)


def test_what_a_text_must_have_is_said_before_it_runs():
    experts = {1: 20, 2: 20}
    require_examinable(32, experts, 20, {"even": {n: Partition.even(20, 20) for n in (1, 2)}})
    for arguments, message in (
        ((31, experts, 2, {}), "31 tokens in a layer; allowed: from 32"),
        ((32, experts, 21, {}), "21 cards for 20 experts"),
        ((32, experts, 2, {"mine": {1: Partition.even(20, 2)}}), "the model has {1: 20, 2: 20}"),
        ((32, {1: 20}, 2, {"mine": {1: Partition.even(24, 2)}}), "mine has .* {1: 24}; the model"),
        ((32, {1: 20}, 2, {"mine": {1: Partition.even(20, 4)}}), "for .4. cards, not 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_examinable(*arguments)
