"""What is refused: keys, models, parameters, limits. Each names what is at fault."""

import dataclasses
import json

import openai
import pytest

from exactmoe.errors import ConfigError
from exactmoe.serve.limits import ServeLimits, token_limits

PARAMETERS = [
    ({"n": 2}, "n", "n is not supported by this server; allowed: to leave it out or n=1"),
    ({"user": "me"}, "user", "user is not supported by this server; allowed: to leave it out"),
    ({"echo": True}, "echo", "or echo=False"),
    ({"temperature": 2.5}, "temperature", "temperature is 2.5; allowed: a number from 0 to 2"),
    ({"top_p": 0}, "top_p", "top_p is 0; allowed: a number above 0, at most 1"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; allowed: an integer from 1"),
    ({"seed": 1.5}, "seed", "seed is 1.5; allowed: a 64-bit integer"),
    ({"stop": ["a", ""]}, "stop", "stop is ['a', '']; allowed: a text, or up to 4 texts"),
    ({"logprobs": 6}, "logprobs", "logprobs is 6; allowed: an integer from 0 to 5"),
    ({"prompt": ["a", "b"]}, "prompt", "prompt has 2 prompts; allowed: one a request"),
    ({"prompt": [2048]}, "prompt", "prompt has token id 2048; allowed: ids from 0 to 2047"),
    ({"prompt": []}, "prompt", "prompt has 0 prompts"),
    ({"stream_options": {}}, "stream_options", "stream_options is given without stream=true"),
    ({"extra_body": {"top_k": 5}}, "top_k", "top_k is not supported by this server"),
]


@pytest.mark.parametrize(("more", "param", "message"), PARAMETERS)
def test_parameters(server, more, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        server.complete(**more)
    assert caught.value.param == param
    assert message in caught.value.body["message"]
    assert caught.value.type == "invalid_request_error"


MESSAGES = [
    ({"messages": []}, "messages", "messages is []; allowed: a list of messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'; allowed: sys"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "allowed: a text, or a list of parts",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name", "name is"),
    ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "={'type': 'text'}"),
    ({"top_logprobs": 1}, "top_logprobs", "top_logprobs is given without logprobs=true"),
    ({"max_completion_tokens": 1, "max_tokens": 1}, "max_tokens", "allowed: one of them"),
]


@pytest.mark.parametrize(("more", "param", "message"), MESSAGES)
def test_chat_parameters(server, more, param, message):
    body = {"model": server.model, "messages": [{"role": "user", "content": "x"}], **more}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_what_asks_for_nothing_is_taken(server):
    neutral = {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0.0, "user": None}
    assert server.text(max_tokens=1, **neutral) == server.text(max_tokens=1)


def test_no_chat_template(server, monkeypatch):
    monkeypatch.setattr(server.service.served.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="no chat template; allowed: /v1/comp") as no:
        server.openai.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "x"}]
        )
    assert no.value.code == "no_chat_template"


def test_a_template_that_refuses(server, monkeypatch):
    template = "{{ raise_exception('turns must alternate') }}"
    monkeypatch.setattr(server.service.served.tokenizer, "chat_template", template)
    with pytest.raises(openai.BadRequestError, match="turns must alternate") as refused:
        server.openai.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "x"}]
        )
    assert refused.value.param == "messages"


def test_models(server):
    (model,) = server.openai.models.list()
    assert (model.id, model.object) == ("glm5_next", "model")
    assert server.openai.models.retrieve("glm5_next") == model
    with pytest.raises(openai.NotFoundError, match="no model 'a/b' here; allowed: 'glm5_next'"):
        server.openai.models.retrieve("a/b")
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.completions.create(model="gpt", prompt="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_lengths(served):
    with served(prompt_tokens=8, total_tokens=12, body_bytes=2000) as server:
        assert server.http.get("/health").json()["max_total_tokens"] == 12
        with pytest.raises(openai.BadRequestError, match="prompt has 9 tokens; allowed: at most 8"):
            server.complete(prompt=[5] * 9)
        with pytest.raises(openai.BadRequestError, match="max_tokens is 5; allowed: at most 4 aft"):
            server.complete(prompt=[5] * 8, max_tokens=5)
        answer = server.complete(prompt=[5] * 8, max_tokens=None)
        assert answer.usage.completion_tokens <= 4
        with pytest.raises(openai.APIStatusError, match="longer than 2000 bytes") as caught:
            server.complete(prompt="x" * 2000)
        assert caught.value.status_code == 413
        assert server.counted("exactmoe_refused_total", status="413") == 1


BODIES = [
    ("{", "application/json", 400, "the body is no JSON object"),
    ("[]", "application/json", 400, "the body is no JSON object"),
    ('{"model": "glm5_next"}', "application/json", 400, "prompt is missing"),
    ("a=b", "application/x-www-form-urlencoded", 415, "allowed: application/json"),
    ('{"model": "m", "prompt": "x"}', "text/plain", 415, "content-type is 'text/plain'"),
]


@pytest.mark.parametrize(("body", "kind", "status", "message"), BODIES)
def test_bodies(server, body, kind, status, message):
    headers = {"content-type": kind}
    answer = server.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_places_that_do_not_exist(server):
    assert server.http.get("/v1/nothing").status_code == 404
    wrong = server.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    for path in ("/docs", "/openapi.json"):
        assert server.http.get(path).json()["error"]["type"] == "invalid_request_error"


def test_keys(served):
    with served(key="sk-right") as server:
        assert server.http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/models/glm5_next"):
            for header in (None, "Bearer sk-wrong", "Basic sk-right", "Bearer"):
                headers = {} if header is None else {"authorization": header}
                refused = server.http.get(path, headers=headers)
                assert refused.status_code == 401
                assert "sk-" not in refused.text
            headers = {"authorization": "Bearer sk-right"}
            assert server.http.get(path, headers=headers).status_code == 200
        with pytest.raises(openai.AuthenticationError) as caught:
            server.complete()
        assert caught.value.code == "invalid_api_key"
        server.openai.api_key = "sk-right"
        assert server.text(max_tokens=1)


def test_metrics_and_health(server):
    server.complete(max_tokens=2)
    page = server.http.get("/metrics").text
    for name in ("requests_total", "new_tokens_total", "waiting", "wait_seconds_bucket"):
        assert f"\nexactmoe_{name}" in page
    health = server.http.get("/health").json()
    assert health["status"] == "ok"
    assert health["one_request_at_a_time"] is True
    assert (health["running"], health["waiting"], health["queue_limit"]) == (0, 0, 16)


def test_what_is_logged_has_no_word_of_a_request(server):
    text = server.complete(prompt="def secret_of_mine(", max_tokens=2)
    server.until(lambda: any(facts["request"] == text.id for facts in server.facts))
    (facts,) = [facts for facts in server.facts if facts["request"] == text.id]
    assert facts["outcome"] == "length" and facts["new_tokens"] == 2
    assert "secret" not in json.dumps(facts)


GOOD = ServeLimits(queue=0, prompt_tokens=1, total_tokens=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue", -1),
        ("prompt_tokens", 0),
        ("prompt_tokens", 2),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("body_bytes", 0),
        ("grace", -1),
    ],
)
def test_limits(field, value):
    with pytest.raises(ConfigError, match=f"{field} is|{field} {value}"):
        dataclasses.replace(GOOD, **{field: value})


def test_token_limits():
    assert token_limits(None, None, 100) == (99, 100)
    assert token_limits(10, 50, 100) == (10, 50)
    assert token_limits(None, 50, None) == (49, 50)
    with pytest.raises(ConfigError, match="101; allowed: at most the model's 100 positions"):
        token_limits(None, 101, 100)
    with pytest.raises(ConfigError, match="give --max-total-tokens"):
        token_limits(None, None, None)
