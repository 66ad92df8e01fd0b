"""The line of requests: its bound, who leaves, who takes too long, what fails, how it ends."""

import threading

import httpx
import openai
import pytest

from exactmoe.serve import engine as engine_module


def outcomes(server, outcome):
    return server.counted("exactmoe_requests_total", outcome=outcome)


def refuses(url):
    """Nobody listens there; until uvicorn has closed the socket, /health says that it stops."""
    try:
        answer = httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    assert (answer.status_code, answer.json()["status"]) == (503, "stopping")
    return False


def test_a_full_line_refuses_and_a_client_that_leaves_makes_place(served):
    with served(queue=1) as server:
        running = server.long_stream()
        found = []
        waiting = threading.Thread(target=lambda: found.append(server.text(max_tokens=2)))
        waiting.start()
        server.until(lambda: server.engine.num_waiting == 1)
        health = server.http.get("/health").json()
        assert (health["running"], health["waiting"]) == (1, 1)
        with pytest.raises(openai.RateLimitError, match="1 requests wait") as caught:
            server.complete()
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert caught.value.code == "queue_full"
        assert found == []
        running.close()
        waiting.join()
        assert server.facts[0]["outcome"] == "cancelled" and server.facts[0]["new_tokens"] > 0
        assert found == [server.text(max_tokens=2)]
        assert outcomes(server, "cancelled") == 1
        assert server.counted("exactmoe_new_tokens_total") < 100
        assert server.counted("exactmoe_refused_total", status="429") == 1


def test_a_client_that_waits_and_leaves(served):
    with served() as server:
        running = server.long_stream()
        with server.asked(prompt="x", max_tokens=5):
            server.until(lambda: server.engine.num_waiting == 1)
        server.until(lambda: outcomes(server, "cancelled") == 1)
        assert (server.engine.num_running, server.engine.num_waiting) == (1, 0)
        running.close()
        server.until(lambda: server.engine.num_running == 0)


def test_a_client_that_asked_for_a_whole_answer_and_leaves(served):
    with served() as server:
        with server.asked(prompt="x", max_tokens=900):
            server.until(lambda: server.counted("exactmoe_new_tokens_total") > 0)
        server.until(lambda: outcomes(server, "cancelled") == 1)
        assert server.engine.num_running == 0


def test_time_limit(served):
    with served(timeout=1.0) as server:
        stream = server.complete(max_tokens=900, stream=True)
        # It waits behind the stream for its whole second, or runs into its end.
        with pytest.raises(openai.APIStatusError, match="1 seconds, the limit") as caught:
            server.complete(max_tokens=900)
        assert caught.value.status_code in (503, 504)
        with pytest.raises(openai.APIError, match="the request took 1 seconds, the limit; it made"):
            list(stream)
        server.until(lambda: server.engine.num_running == 0)
        with pytest.raises(openai.InternalServerError, match="it made [0-9]+ tokens") as caught:
            server.complete(max_tokens=900)
        assert caught.value.status_code == 504
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert outcomes(server, "timeout") == 3


def test_a_model_that_fails(served, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no kernel")

    with served() as server:
        real = engine_module.sample
        monkeypatch.setattr(engine_module, "sample", fails)
        for _ in range(3):
            assert server.http.get("/health").status_code == 200
            with pytest.raises(openai.InternalServerError, match="RuntimeError: no kernel"):
                server.complete()
        answer = server.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "failing")
        with pytest.raises(openai.APIError, match="RuntimeError: no kernel"):
            list(server.complete(stream=True))
        monkeypatch.setattr(engine_module, "sample", real)
        assert server.text(max_tokens=1)
        assert server.http.get("/health").json()["status"] == "ok"
        assert outcomes(server, "error") == 4


def test_a_stop_lets_requests_finish(served):
    with served(grace=60) as server:
        found = []
        stream = server.complete(max_tokens=6, stream=True)
        chunks = iter(stream)
        next(chunks)
        waiting = threading.Thread(target=lambda: found.append(server.text(max_tokens=2)))
        waiting.start()
        server.until(lambda: server.engine.num_waiting == 1)
        server.stop()
        server.until(lambda: server.engine.state == "stopping")
        server.until(lambda: refuses(server.url))
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        waiting.join()
        assert len(found) == 1 and found[0]
        assert outcomes(server, "length") == 2


def test_a_stop_ends_what_takes_longer_than_the_grace(served):
    with served(grace=0.2) as server:
        stream = server.long_stream()
        answers = []

        def ask():
            with pytest.raises(openai.InternalServerError) as caught:
                server.complete()
            answers.append(caught.value)

        waiting = threading.Thread(target=ask)
        waiting.start()
        server.until(lambda: server.engine.num_waiting == 1)
        server.stop()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        waiting.join()
        assert answers[0].status_code == 503
        assert int(answers[0].response.headers["retry-after"]) == 5
        assert outcomes(server, "shutdown") == 2
