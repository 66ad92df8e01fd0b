"""Tokens to pieces of text: whole characters only, and an end at the first stop string.

What is sent is never taken back: what may be the start of a stop string waits until that is clear.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exactmoe.hf.sampling import NewToken

# What a decoder gives for bytes that are no whole character.
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Placed:
    """A token, and the characters [start, end) of the whole text that came with it."""

    token: NewToken
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """Text that is final, and the tokens whose last character lies in it."""

    text: str
    tokens: tuple[Placed, ...]


class TextBuilder:
    """The text of one answer as its tokens come.

    Attributes:
        text: what has come so far, the part that waits included; cut at a stop string.
        stopped: a stop string was found; no further token belongs to the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        """decode: token ids to text, special tokens left out."""
        self._decode, self._stops = decode, tuple(stops)
        self.text, self.stopped = "", False
        self._ids: list[int] = []
        # The text of ids before _read is in self.text; decoding starts at _first, an earlier token,
        # because what a token's text is depends on the one before it.
        self._first = self._read = 0
        self._sent = 0
        self._broken: list[NewToken] = []
        self._waiting: list[Placed] = []

    def add(self, token: NewToken) -> Piece:
        """The next token -> what can be sent now, possibly nothing."""
        if token.is_end:
            return self._release(len(self.text) - self._held())
        self._ids.append(token.id)
        self._broken.append(token)
        before = self._decode(self._ids[self._first : self._read])
        now = self._decode(self._ids[self._first :])
        if now.endswith(_BROKEN):
            return Piece("", ())
        self._append(now[len(before) :])
        return self._cut() or self._release(len(self.text) - self._held())

    def finish(self) -> Piece:
        """What waited, when no token comes any more."""
        if self._broken and not self.stopped:
            before = self._decode(self._ids[self._first : self._read])
            self._append(self._decode(self._ids[self._first :])[len(before) :])
            if (piece := self._cut()) is not None:
                return piece
        return self._release(len(self.text))

    def _append(self, text: str) -> None:
        """The tokens since the last whole character have this text together."""
        start = len(self.text)
        self.text += text
        self._first, self._read = self._read, len(self._ids)
        self._waiting += [Placed(token, start, len(self.text)) for token in self._broken]
        self._broken = []

    def _cut(self) -> Piece | None:
        """Ends the text before the first stop string in it, if there is one."""
        found = [place for stop in self._stops if (place := self.text.find(stop, self._sent)) >= 0]
        if not found:
            return None
        self.text, self.stopped = self.text[: min(found)], True
        self._waiting = [placed for placed in self._waiting if placed.start < len(self.text)]
        piece = Piece(self.text[self._sent :], tuple(self._waiting))
        self._sent, self._waiting = len(self.text), []
        return piece

    def _held(self) -> int:
        """Characters at the end that may be the start of a stop string."""
        unsent = self.text[self._sent :]
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(unsent)), longest, -1):
                if unsent.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, upto: int) -> Piece:
        ready = [placed for placed in self._waiting if placed.end <= upto]
        self._waiting = self._waiting[len(ready) :]
        piece = Piece(self.text[self._sent : upto], tuple(ready))
        self._sent = max(self._sent, upto)
        return piece
