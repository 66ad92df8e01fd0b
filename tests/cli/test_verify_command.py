"""`exactmoe verify`: what it proves, and exit status 1 with the first difference named."""

import json
from types import SimpleNamespace

import pytest
import torch

import exactmoe.hf
import faulty_layers as faults
from exactmoe.cli import verify as command
from exactmoe.cli.verify import chosen, kind_of
from exactmoe.errors import ConfigError
from exactmoe.hf import text
from exactmoe.proof.known_answers import check, read_file
from faulty_layers import faulty

QUICK = ("--widths", "1,2,9", "--prompt", "def main(argv):\n    return [a + b for a in argv]\n")


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """What is told beside the proof took half of the time; tests/cli/test_app.py has it whole."""
    monkeypatch.setattr(command, "TEXT_PROMPT", 9)
    monkeypatch.setattr(command, "TEXT_NEW", 3)


def test_json(run, demo):
    result = run("verify", demo, *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["ok"] is True
    assert content["machine"]["contract"] == 1
    kinds = [report["subject"] for report in content["reports"]]
    assert kinds[0] == "known answers: cpu, contract 1"
    if demo.endswith("glm5_next"):
        assert kinds[1:-1] == ["layer 0: dense, bf16", "layer 1: score, a16, nvfp4"]
    else:
        assert kinds[1:-1] == ["layer 0: hash, a8, mxfp4", "layer 1: score, a8, mxfp4"]
    replayed = content["reports"][-1]["dimensions"]
    assert set(replayed) == {"whole prompt"} | {f"chunks of {n}" for n in (1, 2, 3, 5, 8, 64)}
    assert min(count["comparisons"] for count in replayed.values()) > 5 * 10
    assert set(content["same_text"]) == {"1", "8"}


def test_another_text_is_told_and_fails_nothing(run, glm, monkeypatch):
    def generate(model, tokenizer, ids, max_new_tokens, chunk=None):
        return SimpleNamespace(token_ids=(7, 8) if chunk == 8 else (7,))

    monkeypatch.setattr(text, "generate", generate)
    result = run("verify", glm, *QUICK, "--layers", "0", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["same_text"] == {"1": True, "8": False}
    told = run("verify", glm, *QUICK, "--layers", "0")
    assert told.exit_code == 0, told.stderr
    assert (
        "told, not required: the whole model's greedy text after a prompt in chunks of 1: the same,"
        " 8: differs (attention and norms are transformers' and may depend on the width)\n"
    ) in told.stdout


def test_text(run, glm):
    result = run("verify", glm, *QUICK, "--layers", "2")
    assert result.exit_code == 0, result.stderr
    assert "layer 2: score, a16, nvfp4" in result.stdout
    assert "layer 0" not in result.stdout
    assert "all bytes equal" in result.stdout
    assert "machine: architecture cpu" in result.stdout


@pytest.mark.parametrize(
    ("fault", "dimension"),
    [(faults.Width, "width"), (faults.Position, "position"), (faults.OneScaleForAll, "neighbours")],
)
def test_planted_fault_in_a_layer(run, glm, monkeypatch, fault, dimension):
    right = exactmoe.hf.blocks

    def blocks(model):
        found = right(model)
        faulty(found[1][2], fault)
        return found

    monkeypatch.setattr(exactmoe.hf, "blocks", blocks)
    result = run("verify", glm, *QUICK, "--layers", "1")
    assert result.exit_code == 1
    assert "BITS DIFFER" in result.stdout
    assert f"layer 1: score, a16, nvfp4: {dimension} (block" in result.stderr
    assert "Traceback" not in result.stderr
    as_json = run("verify", glm, *QUICK, "--layers", "1", "--json")
    assert as_json.exit_code == 1
    content = json.loads(as_json.stdout)
    assert content["ok"] is False
    assert content["reports"][1]["dimensions"][dimension]["first"]["dimension"] == dimension


def test_planted_fault_in_the_model(run, glm, monkeypatch):
    """A layer that no proof was asked for is still replayed."""
    right = exactmoe.hf.blocks

    def blocks(model):
        found = right(model)
        faulty(found[3][2], faults.Width)
        return found

    monkeypatch.setattr(exactmoe.hf, "blocks", blocks)
    result = run("verify", glm, *QUICK, "--layers", "1")
    assert result.exit_code == 1
    assert "chunks of 1 (layer 3, chunk from token 0)" in result.stderr


def test_planted_fault_in_a_known_answer(run, glm, monkeypatch):
    stored = read_file()
    stored["cpu"]["dense nvfp4"].y.view(torch.int16)[0, 3] ^= 1
    monkeypatch.setattr(check, "read_files", lambda: stored)
    result = run("verify", glm, *QUICK, "--layers", "1")
    assert result.exit_code == 1
    assert "known answers (dense nvfp4): width 8, token 0, element 3" in result.stderr


REFUSED = [
    (["--prompt", "x = 1\n" * 300], "tokens; the model has 1024 positions"),
    (["--layers", "9"], r"--layers has [9]; allowed: [0, 1, 2, 3, 4, 5]"),
    (["--layers", "one"], "--layers is 'one'; allowed: integers separated by commas"),
    (["--widths", "0"], "--widths is '0'; allowed: integers from 1"),
    (["--widths", ""], "--widths is ''; allowed: integers"),
    (["--layers", "1", "--all"], "--all and --layers were both given"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(run, glm, arguments, message):
    result = run("verify", glm, "--prompt", "x", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_chosen_and_kinds(rng):
    from small_layers import small_dense, small_layer

    layers = [small_dense(rng), small_layer(rng), small_layer(rng), small_layer(rng, "hash")]
    found = [(index, None, layer) for index, layer in enumerate(layers)]
    assert [index for index, _ in chosen(found, None, False)] == [0, 1, 3]
    assert [index for index, _ in chosen(found, None, True)] == [0, 1, 2, 3]
    assert [index for index, _ in chosen(found, (2,), False)] == [2]
    assert kind_of(layers[3]) == "hash, a16, nvfp4"
    with pytest.raises(ConfigError):
        chosen(found, (4,), False)


def test_prompt_is_long_enough_for_every_chunk(glm):
    from exactmoe.hf.text import load_tokenizer, prompt_ids

    assert prompt_ids(load_tokenizer(glm), command.PROMPT).shape[1] > 2 * 64
