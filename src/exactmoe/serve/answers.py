"""Answers in OpenAI's form: whole objects, and the chunks of a stream."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exactmoe.serve.engine import Job
from exactmoe.serve.served import Served
from exactmoe.serve.text import Piece, Placed

DONE = "data: [DONE]\n\n"
# Keeps a connection open that has nothing to say yet; readers of events skip it.
KEEPALIVE = ": waiting\n\n"


def event(content: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"


def usage(job: Job) -> dict[str, int]:
    """Counts of tokens; that of the answer has the token that ended it."""
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.new_tokens,
        "total_tokens": job.prompt_tokens + job.new_tokens,
    }


@dataclass(kw_only=True)
class Completion:
    """Answers of /v1/completions."""

    served: Served
    seed: int | None
    logprobs: bool
    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def whole(self, pieces: Sequence[Piece], outcome: str, job: Job) -> dict[str, Any]:
        """The whole answer."""
        text = "".join(piece.text for piece in pieces)
        tokens = [placed for piece in pieces for placed in piece.tokens]
        return {
            **self._base(self.whole_kind),
            "choices": [self._choice(self._whole_content(text), tokens, outcome)],
            "usage": usage(job),
        }

    def first(self) -> dict[str, Any] | None:
        """A chunk before any text; None: there is none."""
        return None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of one piece."""
        return self._chunk(self._choice(self._part(piece.text), piece.tokens, None))

    def last(self, outcome: str) -> dict[str, Any]:
        """The chunk that says why it ended."""
        return self._chunk(self._choice(self._part(None), None, outcome))

    def counted(self, job: Job) -> dict[str, Any]:
        """The chunk with the usage, behind the last one."""
        return {**self._base(self.chunk_kind), "choices": [], "usage": usage(job)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._base(self.chunk_kind), "choices": [choice], "usage": None}

    def _base(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            # Not OpenAI's: the seed that gives this text again.
            "seed": self.seed,
        }

    def _choice(
        self, content: dict[str, Any], tokens: Sequence[Placed] | None, outcome: str | None
    ) -> dict[str, Any]:
        told = self._logprobs(tokens) if self.logprobs and tokens is not None else None
        return {"index": 0, **content, "logprobs": told, "finish_reason": outcome}

    def _whole_content(self, text: str) -> dict[str, Any]:
        return self._part(text)

    def _part(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _name(self, token: int) -> str:
        text = self.served.token_text(token)
        return f"token_id:{token}" if text is None else text

    def _logprobs(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        name = self._name
        return {
            "tokens": [name(placed.token.id) for placed in tokens],
            "token_logprobs": [placed.token.logprob for placed in tokens],
            "top_logprobs": [
                {name(token): logprob for token, logprob in placed.token.top} for placed in tokens
            ],
            "text_offset": [placed.start for placed in tokens],
        }


@dataclass(kw_only=True)
class Chat(Completion):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def first(self) -> dict[str, Any] | None:
        return self._chunk(
            self._choice({"delta": {"role": "assistant", "content": ""}}, None, None)
        )

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, tokens: Sequence[Placed]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(placed.token.id, placed.token.logprob),
                    "top_logprobs": [self._entry(*pair) for pair in placed.token.top],
                }
                for placed in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.served.token_text(token)
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": None if text is None else list(text.encode()),
        }
