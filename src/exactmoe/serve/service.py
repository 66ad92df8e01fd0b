"""What the routes work with: who may come in, bodies, and requests as jobs."""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from torch import Tensor

from exactmoe.hf.sampling import Sampling
from exactmoe.serve.engine import Closing, Ended, Engine, Job, QueueFull
from exactmoe.serve.limits import ServeLimits
from exactmoe.serve.metrics import Metrics
from exactmoe.serve.problems import Problem
from exactmoe.serve.requests import ChatRequest, CompletionRequest, TextRequest
from exactmoe.serve.served import Served, new_tokens
from exactmoe.serve.text import Piece

# Seconds in which the body of a request must have come.
_BODY_SECONDS = 30.0
# Seconds after which a client of a server that stops is told to come again.
_STOPPING_ADVICE = 5


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes work with.

    Attributes:
        key: that requests must bear; None: everybody may come in.
    """

    served: Served
    engine: Engine
    limits: ServeLimits
    metrics: Metrics
    key: str | None = None

    def require_key(self, request: Request) -> None:
        """Problem unless the request bears the key."""
        if self.key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self.key.encode())
        if scheme.lower() != "bearer" or not right:
            raise Problem(401, "no valid API key was given", code="invalid_api_key")

    def require_place(self) -> None:
        """Problem when the line is full, or when the server stops."""
        with as_problems():
            self.engine.require_place()

    async def body(self, request: Request) -> bytes:
        """The body of a request; Problem for one that is too long, too slow, or no JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of somebody else can send a form or a text here unasked, but no JSON.
        if kind != "application/json":
            raise Problem(415, f"content-type is {kind!r}; allowed: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body_bytes:
                        raise Problem(
                            413,
                            f"the body is longer than {self.limits.body_bytes} bytes",
                            code="body_too_large",
                        )
        except TimeoutError:
            message = f"the body did not come within {_BODY_SECONDS:.0f} seconds"
            raise Problem(408, message) from None
        return bytes(body)

    async def job(self, request: TextRequest, emit: Callable[[Piece | Ended], None]) -> Job:
        """A request as a job; Problem for what the model or the limits don't allow."""
        if request.model != self.served.name:
            raise self.no_model(request.model)
        ids = await asyncio.to_thread(self._ids, request)
        temperature = 1.0 if request.temperature is None else request.temperature
        drawn = secrets.randbelow(2**31) if request.seed is None else request.seed
        sampling = Sampling(
            max_new_tokens=new_tokens(self.limits, ids.shape[1], request),
            temperature=temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=drawn,
            top_logprobs=request.wanted_logprobs,
        )
        return Job(ids, sampling, request.stops, emit)

    def _ids(self, request: TextRequest) -> Tensor:
        if isinstance(request, ChatRequest):
            return self.served.chat(request.messages)
        if isinstance(request, CompletionRequest):
            return self.served.prompt(request.one_prompt)
        raise TypeError(f"{type(request).__name__} has no prompt")

    def no_model(self, name: str) -> Problem:
        """The refusal of a model that is not this one."""
        message = f"there is no model {name!r} here; allowed: {self.served.name!r}"
        return Problem(404, message, param="model", code="model_not_found")


@contextmanager
def as_problems() -> Iterator[None]:
    """The engine's refusals as answers."""
    try:
        yield
    except QueueFull as full:
        raise Problem(
            429,
            f"{full.waiting} requests wait, as many as may; try again later",
            code="queue_full",
            retry_after=full.retry_after,
        ) from None
    except Closing:
        raise stopping() from None


def stopping() -> Problem:
    """The server takes no request, or has ended one, because it stops."""
    return Problem(503, "the server is stopping", code="stopping", retry_after=_STOPPING_ADVICE)


def failure(ended: Ended, job: Job, timeout: float) -> Problem:
    """A job that gave no whole text, as an answer."""
    if ended.outcome == "shutdown":
        return stopping()
    if ended.outcome == "timeout":
        if job.started is None:
            message = f"the request waited {timeout:g} seconds, the limit, and was not started"
            return Problem(503, message, code="timeout", retry_after=_STOPPING_ADVICE)
        message = (
            f"the request took {timeout:g} seconds, the limit; it made {job.new_tokens} tokens"
        )
        return Problem(504, message, code="timeout")
    if ended.outcome == "cancelled":
        return Problem(499, "the client has left", code="cancelled")
    return Problem(500, f"the model failed: {ended.error}", code="model_failed")
