"""One job, followed from the event loop: its events, its client's leaving, its time limit."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request

from exactmoe.serve.engine import Ended, Engine, Job
from exactmoe.serve.text import Piece

# Seconds without an event after which a stream says that it is still there.
_QUIET = 10.0

Inbox = asyncio.Queue[Piece | Ended]


async def left(request: Request) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def follow(
    engine: Engine, job: Job, inbox: Inbox, request: Request, timeout: float
) -> AsyncIterator[Piece | Ended | None]:
    """The job's pieces and its Ended, the last; None now and then while nothing comes.

    A client that leaves, or a time limit that passes, ends the job; its Ended comes as always.
    """
    deadline = job.arrived + timeout
    gone = asyncio.ensure_future(left(request))
    coming = asyncio.ensure_future(inbox.get())
    try:
        while True:
            now = time.perf_counter()
            late = now >= deadline
            if late:
                engine.end(job, "timeout")
            wait = _QUIET if late else min(_QUIET, deadline - now)
            watched = {coming} if gone.done() else {coming, gone}
            await asyncio.wait(watched, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                happened = coming.result()
                yield happened
                if isinstance(happened, Ended):
                    return
                coming = asyncio.ensure_future(inbox.get())
            elif gone.done():
                engine.end(job, "cancelled")
            else:
                yield None
    finally:
        coming.cancel()
        gone.cancel()
        # Only where nobody listens any more: a job that has ended stays as it is.
        engine.end(job, "cancelled")
