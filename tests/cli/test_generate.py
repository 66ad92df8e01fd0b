"""`exactmoe generate`: greedy, streamed, chunked, stopped at eos and at ctrl-C."""

import json
from pathlib import Path

import pytest
import torch

from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.hf import blocks, load_model
from exactmoe.hf.text import generate, load_tokenizer, prompt_ids, run_prompt

DEMO = Path(__file__).resolve().parents[2] / "demo"
PROMPT = "def main(argv):\n    import os\n    for name in os.listdir(argv[1]):\n"


@pytest.fixture(scope="module", params=["glm5_next", "deepseek_v4"])
def loaded(request):
    folder = DEMO / request.param
    return load_model(folder, progress=False), load_tokenizer(folder)


def plain_greedy(model, ids, count):
    """The loop without a cache."""
    with torch.no_grad():
        for _ in range(count):
            last = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
    return ids[0, -count:].tolist()


def test_greedy_streams_what_it_returns(loaded):
    model, tokenizer = loaded
    ids = prompt_ids(tokenizer, PROMPT)
    pieces = []
    made = generate(model, tokenizer, ids, 12, on_text=pieces.append)
    assert list(made.token_ids) == plain_greedy(model, ids, 12)
    assert made.text == tokenizer.decode(made.token_ids) == "".join(pieces)
    assert len(pieces) > 2
    assert (made.prompt_tokens, made.stop) == (ids.shape[1], "length")
    assert 0 < made.prompt_seconds < made.seconds
    assert made.tokens_per_second == pytest.approx(11 / (made.seconds - made.prompt_seconds))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunk_is_the_width_of_every_block(loaded, chunk):
    model, tokenizer = loaded
    ids = prompt_ids(tokenizer, PROMPT)
    widths = []
    _, block, _ = blocks(model)[-1]
    handle = block.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    try:
        made = generate(model, tokenizer, ids, 3, chunk=chunk)
    finally:
        handle.remove()
    whole, rest = divmod(ids.shape[1], chunk)
    assert widths == [chunk] * whole + [rest] * (rest > 0) + [1, 1]
    assert made.token_ids == generate(model, tokenizer, ids, 3).token_ids


def test_stops_at_eos(loaded):
    model, tokenizer = loaded
    ids = prompt_ids(tokenizer, PROMPT)
    tokens = generate(model, tokenizer, ids, 8).token_ids
    end = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = tokens[end]
    try:
        made = generate(model, tokenizer, ids, 8)
    finally:
        model.generation_config.eos_token_id = before
    assert made.stop == "eos"
    assert made.token_ids == tokens[: end + 1]


def test_ctrl_c_keeps_what_came(loaded):
    model, tokenizer = loaded
    ids = prompt_ids(tokenizer, PROMPT)
    pieces = []

    def interrupt(text):
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    made = generate(model, tokenizer, ids, 20, on_text=interrupt)
    assert made.stop == "interrupted"
    assert 0 < len(made.token_ids) < 20
    assert made.text.startswith("".join(pieces[:1]))
    assert "".join(pieces) == made.text


def test_prompt_ids(loaded):
    _, tokenizer = loaded
    assert prompt_ids(tokenizer, "x").dtype == torch.int64
    turn = prompt_ids(tokenizer, "hello", chat=True)[0].tolist()
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert turn == tokenizer(template, add_special_tokens=False).input_ids
    assert turn.count(tokenizer.bos_token_id) == 1


def test_no_chat_template(loaded):
    _, tokenizer = loaded
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(ConfigError, match="no chat template"):
            prompt_ids(tokenizer, "hello", chat=True)
    finally:
        tokenizer.chat_template = template


REFUSED = [
    ((0, None), "max_new_tokens is 0; allowed: from 1"),
    ((1, 0), "chunk is 0; allowed: from 1"),
    ((1024, None), "the prompt has . tokens and 1024 new .*; the model has 1024 positions"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(loaded, arguments, message):
    model, tokenizer = loaded
    with pytest.raises(ConfigError, match=message):
        generate(model, tokenizer, prompt_ids(tokenizer, "x"), *arguments)


def test_prompt_longer_than_the_context(loaded):
    model, tokenizer = loaded
    ids = torch.full((1, 1025), 7)
    with pytest.raises(ConfigError, match="the prompt has 1025 tokens .* has 1024 positions"):
        generate(model, tokenizer, ids, 1)
    with pytest.raises(ConfigError, match="the prompt has 1025 tokens; the model has 1024 pos"):
        run_prompt(model, ids)


def test_no_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_json(run, demo):
    result = run("generate", demo, "--prompt", "def main(", "--max-new-tokens", 6, "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["text"]
    assert (content["new_tokens"], content["stop"]) == (6, "length")
    assert content["prompt_tokens"] > 1
    assert content["tokens_per_second"] > 0
    experts, layers, bits = {"glm5_next": (20, 5, 4.5), "deepseek_v4": (24, 5, 4.25)}[
        Path(demo).name
    ]
    values = experts * layers * 3 * 256 * 128
    global_scales = 4 * 3 * experts * layers if bits == 4.5 else 0
    assert content["expert_bytes_bf16"] == 2 * values
    assert content["expert_bytes_in_memory"] == values * bits / 8 + global_scales
    assert content["numerics"] == (["a16"] if bits == 4.5 else ["a8"])
    assert content["backend"] == ["cpu"]
    assert content["explain"]["1"]["backend"] == "cpu"


def test_json_of_a_chunked_prompt(run, glm):
    arguments = ("generate", glm, "--prompt", PROMPT, "--max-new-tokens", 3, "--json")
    whole, chunked = run(*arguments), run(*arguments, "--chunk", 3)
    assert (whole.exit_code, chunked.exit_code) == (0, 0)
    facts = [json.loads(result.stdout) for result in (whole, chunked)]
    assert [content["chunk"] for content in facts] == [None, 3]
    assert facts[0]["text"] == facts[1]["text"]


def test_text(run, glm):
    result = run("generate", glm, "--prompt", "def main(", "--max-new-tokens", 4, "--chunk", 2)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("def main(")
    assert "4 tokens (length)" in result.stderr
    chat = run("generate", glm, "--prompt", "Sort a list", "--max-new-tokens", 4, "--chat")
    assert chat.exit_code == 0
    assert not chat.stdout.startswith("Sort")


def test_two_cards_write_the_same_text(run, glm):
    asked = ["generate", glm, "--prompt", "def main(", "--max-new-tokens", 4]
    one, two = (run(*asked, "--cards", cards) for cards in ("cpu", "cpu,cpu"))
    assert two.exit_code == 0, two.stderr
    assert two.stdout == one.stdout


def test_refusals_are_one_line(run, glm):
    for extra, message in [
        (["--numerics", "a4"], "--numerics is 'a4'; allowed: a16, a8"),
        (["--backend", "gpu"], "backend is 'gpu'; allowed: auto, cuda, triton, cpu, reference"),
        (["--max-new-tokens", "2000"], "the model has 1024 positions"),
    ]:
        result = run("generate", glm, "--prompt", "x", *extra)
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr
