"""The demo models on a card: text, and recorded MLP inputs replayed in chunks of 1 to 64 tokens."""

import json
import os
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from typer.testing import CliRunner

from exactmoe.cli.app import build
from exactmoe.proof import recording, replay

DEMO = Path(__file__).resolve().parents[2] / "demo"
PROMPT = """\
def read_lines(path, encoding="utf-8"):
    result = {}
    with open(path, encoding=encoding) as handle:
        for number, line in enumerate(handle, start=1):
            name, separator, value = line.partition("=")
            if not separator:
                raise ValueError(f"{path}, line {number}: no value for {name!r}")
            result[name.strip()] = value.strip()
    return result
"""


@pytest.fixture(scope="module")
def models():
    """(name, device) -> model and tokenizer, loaded once."""
    from exactmoe.hf import load_model
    from exactmoe.hf.text import load_tokenizer, quiet

    quiet()
    kept = {}

    def model(name, device):
        if (name, device) not in kept:
            card = "cuda:0" if device == "cuda" else device
            loaded = load_model(str(DEMO / name), cards=(card,), progress=False)
            kept[name, device] = loaded, load_tokenizer(str(DEMO / name))
        return kept[name, device]

    return model


@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v4"])
def test_recorded_inputs_in_chunks(models, device, name):
    from exactmoe.hf import blocks
    from exactmoe.hf.text import prompt_ids, run_prompt

    model, tokenizer = models(name, device)
    ids = prompt_ids(tokenizer, PROMPT)
    found = blocks(model)
    assert {layer.device.type for _, _, layer in found} == {device}
    with recording(found) as calls:
        run_prompt(model, ids)
    sizes = (1, 2, 3, 5, 8, 64) if device == "cuda" else (5, 64)
    report = replay(calls, sizes)
    report.raise_on_mismatch()
    assert len(calls) == len(found)
    assert set(report.dimensions) == {"whole prompt", *(f"chunks of {size}" for size in sizes)}


@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v4"])
def test_text(models, device, name):
    """It writes, it is the same text twice, and no expert id was out of range."""
    from exactmoe.hf import blocks
    from exactmoe.hf.text import generate, prompt_ids

    model, tokenizer = models(name, device)
    ids = prompt_ids(tokenizer, "def main(argv):\n")
    new = 24 if device == "cuda" else 4
    first, second = (generate(model, tokenizer, ids, new) for _ in range(2))
    assert len(first.token_ids) == new or first.token_ids
    assert first.token_ids == second.token_ids
    for _, _, layer in blocks(model):
        if hasattr(layer, "check"):
            layer.check()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v4"])
def test_the_verify_command(name):
    """`exactmoe verify` of a demo model: everything is equal, in a minute (kernels compiled)."""
    runner, arguments = CliRunner(), ["verify", str(DEMO / name), "--cards", "cuda:0", "--json"]
    first = runner.invoke(build(), arguments)
    assert first.exit_code == 0, first.stderr
    start = time.perf_counter()
    second = runner.invoke(build(), arguments)
    assert second.exit_code == 0, second.stderr
    assert time.perf_counter() - start < 60
    reports = json.loads(second.stdout)["reports"]
    layers = [report for report in reports if report["subject"].startswith("layer")]
    assert len(layers) >= 2
    assert all("captured" in report["dimensions"] for report in layers)
