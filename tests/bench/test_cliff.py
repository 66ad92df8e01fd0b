"""The rule that no width costs much more than its neighbour."""

from exactmoe.bench.cliff import cliff_widths, steps
from exactmoe.bench.record import BLOCK, EXPERTS, OURS, Record
from exactmoe.bench.timing import Timing


def point(tokens, us, distinct, part=EXPERTS, what=OURS):
    return Record(part, what, tokens, Timing(us, us, us), distinct_experts=distinct)


def test_widths_around_tiles():
    widths = cliff_widths(lambda width: (width >= 8, width > 64), widest=100)
    assert widths[:17] == tuple(range(1, 18))
    assert widths[17:] == (63, 64, 65, 66)
    assert cliff_widths(lambda width: width > 64, widest=65) == tuple(range(1, 18))


def test_one_token_more():
    records = [point(16, 100, 50), point(17, 137, 55), point(18, 138, 55), point(20, 900, 60)]
    first, second = steps(records)
    assert (first.low, first.high) == (16, 17) and first.allowed == 1.25 * 55 / 50
    assert first.ok and second.ok
    cliff, _ = steps([point(16, 100, 50), point(17, 138, 55), point(18, 138, 55)])
    assert not cliff.ok
    assert str(cliff).startswith("CLIFF: 16 -> 17 tokens takes 1.380 times as long; allowed 1.375")


def test_fewer_experts_do_not_lower_what_is_allowed():
    (step,) = steps([point(30, 100, 50), point(31, 120, 40)])
    assert step.allowed == 1.25 and step.ok


def test_union_of_experts():
    found = steps([point(1, 40, 8), point(8, 270, 58)])
    (step,) = found
    assert step.rule == "the union of experts"
    assert abs(step.allowed - 1.15 * 58 / 8) < 1e-9 and step.ok
    (slow,) = steps([point(1, 40, 8), point(8, 340, 58)])
    assert not slow.ok


def test_others_and_failures_do_not_count():
    failed = Record(EXPERTS, OURS, 2, note="no")
    others = [point(2, 1, 8, part=BLOCK), point(2, 9, 8, what="peer"), failed]
    assert steps([point(1, 40, 8), *others]) == []
