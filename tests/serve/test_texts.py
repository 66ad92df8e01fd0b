"""Texts over HTTP: those of `generate`, streamed or not, the same whatever waits beside them."""

import threading

import openai
import pytest
import torch

from exactmoe.hf.text import chat_ids, generate, prompt_ids

PROMPT = "def main("
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "max_tokens": 5}


def expected(server, ids, count):
    served = server.service.served
    return generate(served.model, served.tokenizer, ids, count)


def test_a_completion_is_the_text_of_generate(server):
    ids = prompt_ids(server.service.served.tokenizer, PROMPT)
    made = expected(server, ids, 8)
    answer = server.complete(PROMPT, 8)
    (choice,) = answer.choices
    assert choice.text == made.text
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (ids.shape[1], 8)
    assert answer.usage.total_tokens == ids.shape[1] + 8
    assert (answer.model, answer.object) == ("glm5_next", "text_completion")
    assert answer.system_fingerprint.startswith("fp_")
    assert server.text(prompt=ids[0].tolist(), max_tokens=8) == made.text


def test_a_stream_has_the_same_text_and_usage(server):
    whole = server.complete(max_tokens=5)
    options = {"include_usage": True}
    chunks = list(server.complete(max_tokens=5, stream=True, stream_options=options))
    *parts, last, counted = chunks
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(parts) > 2
    assert {part.choices[0].finish_reason for part in parts} == {None}
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
    assert counted.choices == [] and counted.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_done(server):
    body = {"model": "glm5_next", "prompt": PROMPT, "max_tokens": 1, "stream": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["x-request-id"].startswith("cmpl-")


def test_chat_writes_the_template(server):
    turns = [{"role": "user", "content": "Sort a list"}, {"role": "assistant", "content": "x"}]
    made = expected(server, chat_ids(server.service.served.tokenizer, turns), 4)
    ask = server.openai.chat.completions.create
    settings = {"model": "glm5_next", "temperature": 0, "max_completion_tokens": 4}
    answer = ask(messages=turns, **settings)
    assert answer.choices[0].message.content == made.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == made.prompt_tokens
    parts = [{"type": "text", "text": "Sort a"}, {"type": "text", "text": " list"}]
    turns[0] = {"role": "user", "content": parts}
    chunks = list(ask(messages=turns, stream=True, **settings))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == made.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_same_request_has_the_same_text_whatever_is_queued(server):
    """Alone, and between others: other seeds, long ones that are given up, refused ones."""
    kept = [{"max_tokens": 4}, SAMPLED, {**SAMPLED, "seed": 6, "prompt": "class A"}]
    alone = [server.text(**request) for request in kept]
    others = [{**SAMPLED, "seed": 100 + place, "max_tokens": 2} for place in range(3)]
    requests = [kept[0], others[0], kept[1], others[1], kept[2], kept[1], others[2]]
    left = server.long_stream()
    found = {}

    def ask(place):
        found[place] = server.text(**requests[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(requests))]
    for thread in threads:
        thread.start()
        torch.rand(7)
    server.until(lambda: server.engine.num_waiting == len(requests))
    with pytest.raises(openai.BadRequestError):
        server.complete(n=2)
    left.close()
    for thread in threads:
        thread.join()
    assert [found[place] for place in (0, 2, 4)] == alone
    assert found[5] == alone[1]


def test_a_seed_that_was_drawn_gives_the_text_again(server):
    answer = server.complete(temperature=1.3)
    again = server.complete(temperature=1.3, seed=answer.seed)
    assert again.choices[0].text == answer.choices[0].text
    other = server.complete(temperature=1.3, max_tokens=1)
    assert other.seed != answer.seed
    assert server.complete(max_tokens=1).seed is None


def test_stop_strings_end_the_text_before_them(server):
    whole = server.text(max_tokens=6)
    # From the middle of a token into the next.
    stop = whole[len(whole) // 2 - 1 : len(whole) // 2 + 4]
    cut = whole[: whole.index(stop)]
    answer = server.complete(max_tokens=6, stop=["never", stop])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    assert answer.usage.completion_tokens < 6
    chunks = list(server.complete(max_tokens=6, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_are_the_models(server):
    served = server.service.served
    ids = prompt_ids(served.tokenizer, PROMPT)
    with torch.no_grad():
        logits = served.model(input_ids=ids).logits[0, -1].double()
    expected = logits.log_softmax(0)
    top = expected.sort(descending=True, stable=True)
    # A seed whose token is not the likeliest: before temperature and top_p.
    settings = {"temperature": 2.0, "max_tokens": 1, "logprobs": 3}
    answer = next(
        made
        for seed in range(50)
        if (made := server.complete(seed=seed, **settings)).choices[0].logprobs.token_logprobs[0]
        < top.values[2]
    )
    (told,) = answer.choices[0].logprobs.top_logprobs
    names = [served.token_text(token) for token in top.indices[:3].tolist()]
    assert list(told) == names
    assert list(told.values()) == pytest.approx(top.values[:3].tolist(), abs=1e-12)
    (name,) = answer.choices[0].logprobs.tokens
    (token,) = served.tokenizer(name, add_special_tokens=False).input_ids
    found = answer.choices[0].logprobs.token_logprobs
    assert found == pytest.approx([float(expected[token])], abs=1e-12)
    assert answer.choices[0].logprobs.text_offset == [0]


def test_logprobs_of_a_chat(server):
    answer = server.openai.chat.completions.create(
        model="glm5_next",
        messages=[{"role": "user", "content": "Sort a list"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob < 0
        assert entry.top_logprobs[1].logprob < entry.logprob
