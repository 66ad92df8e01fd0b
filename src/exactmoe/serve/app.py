"""The web application: its routes, and the way of a request through them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from exactmoe.serve.answers import DONE, KEEPALIVE, Chat, Completion, event
from exactmoe.serve.engine import Ended, Job
from exactmoe.serve.follow import Inbox, follow
from exactmoe.serve.problems import Problem
from exactmoe.serve.requests import ChatRequest, CompletionRequest, TextRequest, parse
from exactmoe.serve.service import Service, as_problems, failure
from exactmoe.serve.text import Piece

_EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_FINISHED = ("stop", "length")
_CLIENT_LEFT = 499


def build_app(service: Service) -> FastAPI:
    """The application around a service. It starts and closes the service's engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await asyncio.to_thread(service.engine.close)

    # No pages of FastAPI's own: they load scripts from elsewhere.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _tell_problems(app, service)

    @app.get("/health")
    async def health() -> JSONResponse:
        told = _health(service)
        return JSONResponse(told, 200 if told["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.require_key(request)
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        service.require_key(request)
        return {"object": "list", "data": [_model(service)]}

    # A hub id has a slash in it.
    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        service.require_key(request)
        if name != service.served.name:
            raise service.no_model(name)
        return _model(service)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, CompletionRequest, Completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatRequest, Chat)

    return app


def _tell_problems(app: FastAPI, service: Service) -> None:
    """Every refusal and failure in OpenAI's form."""

    def told(problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
        service.metrics.refused.labels(str(problem.status)).inc()
        made = {"x-request-id": uuid.uuid4().hex, **problem.headers(), **(headers or {})}
        return JSONResponse(problem.body(), problem.status, made)

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> JSONResponse:
        return told(problem)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return told(Problem(error.status_code, message), dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def on_left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return told(Problem(500, f"{type(error).__name__} in the server; its log has more"))


def _health(service: Service) -> dict[str, Any]:
    engine, served = service.engine, service.served
    return {
        "status": engine.state,
        "model": served.name,
        "one_request_at_a_time": True,
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "queue_limit": engine.queue,
        "max_prompt_tokens": service.limits.prompt_tokens,
        "max_total_tokens": service.limits.total_tokens,
        "system_fingerprint": served.fingerprint,
        **served.facts,
    }


def _model(service: Service) -> dict[str, Any]:
    served = service.served
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "exactmoe",
        "max_model_len": service.limits.total_tokens,
    }


async def _answer(
    service: Service, request: Request, kind: type[TextRequest], form: type[Completion]
) -> Response:
    service.require_key(request)
    # Before the body is read: a full line costs nothing.
    service.require_place()
    asked = parse(kind, await service.body(request))
    loop, inbox = asyncio.get_running_loop(), Inbox()

    def emit(happened: Piece | Ended) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, happened)

    job = await service.job(asked, emit)
    seed = job.sampling.seed if job.sampling.temperature > 0 else None
    answer = form(served=service.served, seed=seed, logprobs=asked.wanted_logprobs is not None)
    job.name = answer.id
    with as_problems():
        service.engine.submit(job)
    events = follow(service.engine, job, inbox, request, service.limits.timeout)
    headers = {"x-request-id": answer.id}
    if asked.stream:
        chunks = _stream(service, answer, job, events, asked.includes_usage)
        return StreamingResponse(
            chunks, media_type="text/event-stream", headers={**headers, **_EVENT_HEADERS}
        )
    return JSONResponse(await _whole(service, answer, job, events), headers=headers)


async def _whole(
    service: Service, answer: Completion, job: Job, events: AsyncIterator[Piece | Ended | None]
) -> dict[str, Any]:
    pieces: list[Piece] = []
    async for happened in events:
        if isinstance(happened, Ended):
            if happened.outcome not in _FINISHED:
                raise failure(happened, job, service.limits.timeout)
            return answer.whole(pieces, happened.outcome, job)
        if happened is not None:
            pieces.append(happened)
    raise RuntimeError("a job ended without an event that says so")


async def _stream(
    service: Service,
    answer: Completion,
    job: Job,
    events: AsyncIterator[Piece | Ended | None],
    includes_usage: bool,
) -> AsyncIterator[str]:
    if (first := answer.first()) is not None:
        yield event(first)
    async for happened in events:
        if happened is None:
            yield KEEPALIVE
        elif not isinstance(happened, Ended):
            yield event(answer.chunk(happened))
        elif happened.outcome in _FINISHED:
            yield event(answer.last(happened.outcome))
            if includes_usage:
                yield event(answer.counted(job))
            yield DONE
        else:
            yield event(failure(happened, job, service.limits.timeout).body())
