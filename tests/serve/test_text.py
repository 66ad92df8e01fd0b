"""TextBuilder: whole characters, stop strings, and the tokens of each piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactmoe.hf.sampling import NewToken
from exactmoe.serve.text import TextBuilder


def build(parts, stops=()):
    """Feeds tokens that stand for these bytes -> (pieces, builder)."""
    table = dict(enumerate(parts))
    builder = TextBuilder(
        lambda ids: b"".join(table[token] for token in ids).decode("utf-8", "replace"), stops
    )
    pieces = []
    for token in table:
        pieces.append(builder.add(NewToken(token)))
        if builder.stopped:
            break
    return [*pieces, builder.finish()], builder


def texts(pieces):
    return [piece.text for piece in pieces]


def tokens(pieces):
    return [placed.token.id for piece in pieces for placed in piece.tokens]


def test_each_token_is_sent_at_once():
    pieces, _ = build([b"def", b" main", b"(", b""])
    assert texts(pieces) == ["def", " main", "(", "", ""]
    assert [len(piece.tokens) for piece in pieces] == [1, 1, 1, 1, 0]


def test_a_character_of_several_tokens_is_sent_whole():
    smile = "🙂".encode()
    pieces, builder = build([b"a", smile[:1], smile[1:3], smile[3:], b"b"])
    assert texts(pieces) == ["a", "", "", "🙂", "b", ""]
    assert [[(p.token.id, p.start, p.end) for p in piece.tokens] for piece in pieces][3] == [
        (1, 1, 2),
        (2, 1, 2),
        (3, 1, 2),
    ]
    assert builder.text == "a🙂b"


def test_bytes_that_stay_broken_come_at_the_end():
    pieces, builder = build([b"a", b"\xf0", b"\x9f"])
    assert texts(pieces) == ["a", "", "", "\ufffd"]
    assert tokens(pieces) == [0, 1, 2]
    assert builder.text == "a\ufffd"


STOPS = [
    ([b"ab", b"cd", b"ef"], ["cd"], "ab"),
    ([b"ab", b"cd", b"ef"], ["bc"], "a"),
    ([b"ab", b"cd", b"ef"], ["ef", "de"], "abc"),
    ([b"ab", b"cd", b"ef"], ["ab"], ""),
    ([b"aa", b"ab"], ["aab"], "a"),
    ([b"\n", b"\n", b"x"], ["\n\n"], ""),
    ([b"x", b"\xc3", b"\xa9y"], ["é"], "x"),
    ([b"x", b"\xc3"], ["\ufffd"], "x"),
]


@pytest.mark.parametrize(("parts", "stops", "text"), STOPS)
def test_a_stop_string_ends_the_text_before_it(parts, stops, text):
    pieces, builder = build(parts, stops)
    assert builder.stopped
    assert "".join(texts(pieces)) == builder.text == text


def test_what_may_become_a_stop_string_waits():
    pieces, builder = build([b"ab", b"c", b"d", b"abx", b"ab"], ["abcx", "bcdy"])
    assert texts(pieces) == ["", "", "a", "bcdabx", "", "ab"]
    assert not builder.stopped
    assert tokens(pieces) == [0, 1, 2, 3, 4]


def test_an_end_token_has_no_text():
    builder = TextBuilder(lambda ids: "x" * len(ids))
    assert builder.add(NewToken(5)).text == "x"
    assert builder.add(NewToken(2, is_end=True)).tokens == ()
    assert builder.finish().text == ""
    assert builder.text == "x"


@given(
    st.text("aé🙂\n", max_size=12).map(str.encode),
    st.lists(st.integers(1, 3), min_size=12, max_size=60),
    st.lists(st.text("aé🙂\n", min_size=1, max_size=4), max_size=3),
)
def test_pieces_are_the_text_up_to_the_first_stop_string(text, sizes, stops):
    parts, place = [], 0
    for size in sizes:
        if place < len(text):
            parts.append(text[place : place + size])
            place += size
    parts.append(text[place:])
    pieces, builder = build(parts, stops)
    whole = text.decode()
    sent = "".join(texts(pieces))
    assert whole.startswith(sent)
    assert sent == builder.text
    found = [stop for stop in stops if stop in whole]
    assert builder.stopped == bool(found)
    assert not any(stop in sent for stop in stops)
    if not found:
        assert sent == whole
        assert tokens(pieces) == list(range(len(parts)))
