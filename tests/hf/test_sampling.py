"""Tokens by seed: the distribution, its own generator, log-probabilities, ends from outside."""

from pathlib import Path

import pytest
import torch

from exactmoe.errors import ConfigError
from exactmoe.hf import blocks, load_model
from exactmoe.hf.sampling import Sampling, choose, interruptible, sample
from exactmoe.hf.text import generate, load_tokenizer, prompt_ids

DEMO = Path(__file__).resolve().parents[2] / "demo"
MANY = 2_000


def chosen(logits, **settings):
    """Frequencies of MANY choices."""
    sampling = Sampling(max_new_tokens=1, **settings)
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(len(logits), dtype=torch.float64)
    for _ in range(MANY):
        counts[choose(logits, sampling, generator)] += 1
    return counts / MANY


LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.0, float("-inf")], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_distribution(temperature):
    expected = (LOGITS / temperature).softmax(0)
    error = (expected * (1 - expected) / MANY).sqrt()
    found = chosen(LOGITS, temperature=temperature)
    assert ((found - expected).abs() <= 4 * error).all()
    assert found[4] == 0


def test_top_p_keeps_the_likeliest_tokens_equal_ones_by_id():
    logits = torch.tensor([0.1, 0.4, 0.1, 0.4], dtype=torch.float64).log()
    for top_p, kept in ((0.3, [1]), (0.4, [1]), (0.41, [1, 3]), (0.85, [0, 1, 3]), (1.0, range(4))):
        found = chosen(logits, temperature=1.0, top_p=top_p)
        assert found.nonzero().flatten().tolist() == list(kept)
    two = chosen(logits, temperature=1.0, top_p=0.41)
    assert two[1] == pytest.approx(0.5, abs=4 * (0.25 / MANY) ** 0.5)


def test_logits_that_are_no_numbers():
    for bad in (float("nan"), float("inf")):
        logits = torch.tensor([0.0, bad], dtype=torch.float64)
        with pytest.raises(ArithmeticError, match="NaN, or none that is finite"):
            choose(logits, Sampling(max_new_tokens=1, temperature=1.0), torch.Generator())


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1)],
)
def test_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} is {value}"):
        Sampling(max_new_tokens=1, **{field: value})


@pytest.fixture(scope="module")
def loaded():
    folder = DEMO / "deepseek_v4"
    return load_model(folder, progress=False), load_tokenizer(folder)


def made(loaded, count, on_token=lambda token: True, **settings):
    """(tokens, why it ended) of one text."""
    model, tokenizer = loaded
    tokens = []
    ids = prompt_ids(tokenizer, "def main(")
    sampling = Sampling(max_new_tokens=count, **settings)

    def take(token):
        tokens.append(token)
        return on_token(token)

    return tokens, sample(model, tokenizer, ids, sampling, take)


def test_temperature_0_is_generate(loaded):
    tokens, stop = made(loaded, 6)
    expected = generate(*loaded, prompt_ids(loaded[1], "def main("), 6)
    assert tuple(token.id for token in tokens) == expected.token_ids
    assert (stop, tokens[0].logprob) == ("length", None)
    told, _ = made(loaded, 6, top_logprobs=1)
    assert [token.id for token in told] == [token.id for token in tokens]
    assert all(token.top == ((token.id, token.logprob),) for token in told)


def test_a_seed_gives_its_text_whatever_others_draw(loaded):
    settings = {"temperature": 1.0, "seed": 3}
    torch.manual_seed(0)
    first, _ = made(loaded, 5, **settings)
    state = torch.random.get_rng_state()
    again, _ = made(loaded, 5, lambda token: torch.rand(3) is not None, **settings)
    assert again == first
    torch.random.set_rng_state(state)
    made(loaded, 1, **settings)
    assert torch.equal(torch.random.get_rng_state(), state)
    other, _ = made(loaded, 5, temperature=1.0, seed=4)
    assert other != first


def test_ends(loaded):
    model, _ = loaded
    tokens, stop = made(loaded, 6, lambda token: False)
    assert (len(tokens), stop) == (1, "stopped")
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = tokens[0].id
    try:
        tokens, stop = made(loaded, 6)
    finally:
        model.generation_config.eos_token_id = before
    assert (stop, [token.is_end for token in tokens]) == ("eos", [True])


class Enough(Exception):
    pass


def test_a_prompt_can_be_given_up_in_its_middle(loaded):
    """At a block that is not the first; and the next text is as if nothing had been."""
    model, _ = loaded
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise Enough

    expected, _ = made(loaded, 3)
    with interruptible(model, check), pytest.raises(Enough):
        made(loaded, 3)
    assert len(calls) == 3 < len(blocks(model))
    assert made(loaded, 3)[0] == expected
    assert len(calls) == 3
