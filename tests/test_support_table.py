"""README's support table says what happens: every cell is written, loaded, run and compared."""

from pathlib import Path

import pytest
from torch import Tensor, nn

import experts_classes
import support
from exactmoe.checkpoint.dialects import DIALECTS, REFUSED_LAYOUTS, STACKED_DIALECTS
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.families import family_of
from exactmoe.hf import blocks, experts, load_model
from storages import STORAGES, Storage
from support import Outcome, outcome
from support_table import (
    ARCHITECTURES_BEGIN,
    CLASSES_BEGIN,
    NOTES,
    ROWS,
    architectures_table,
    classes_table,
    row,
    table,
    written,
    written_classes,
)

WRITE = "python tests/helpers/support_table.py --write writes it"


def _line(label: str) -> str:
    lines = [line for line in written().splitlines() if line.startswith(f"| {label} |")]
    assert len(lines) == 1, f"README has {len(lines)} rows for {label!r}; {WRITE}"
    return lines[0]


@pytest.mark.parametrize("label", ROWS)
def test_row(label: str) -> None:
    found = row(label)
    assert _line(label) == found, f"README differs; {WRITE}"


def test_the_rest_of_the_table() -> None:
    assert written() == table([_line(label) for label in ROWS]), f"README differs; {WRITE}"
    cells = "".join(_line(label) for label in ROWS)
    unused = [note for number, note in enumerate(NOTES) if f"({'abcdefghij'[number]})" not in cells]
    assert not unused, f"no cell refers to {unused}"


@pytest.mark.parametrize("model_type", experts_classes.MODEL_TYPES)
def test_experts_class(model_type: str) -> None:
    found = experts_classes.outcome(model_type)
    if found is None:
        pytest.skip(f"this transformers has no {model_type}")
    assert written_classes()[model_type] == found, f"README differs; {WRITE}"


def test_the_rest_of_the_classes() -> None:
    outcomes = written_classes()
    assert set(outcomes) == set(experts_classes.MODEL_TYPES)
    assert written(CLASSES_BEGIN) == classes_table(outcomes), f"README differs; {WRITE}"


def test_architectures() -> None:
    assert written(ARCHITECTURES_BEGIN) == architectures_table(), f"README differs; {WRITE}"


def test_a_wrong_experts_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clamp at 0.5 that the class does not have."""
    monkeypatch.setitem(
        experts._GATES, "transformers.integrations.moe._default_apply_gate", lambda module: 0.5
    )
    with pytest.raises(AssertionError, match="mixtral: relative error"):
        experts_classes.outcome("mixtral")


def test_every_dialect_is_in_it() -> None:
    known = {dialect.name for dialect in (*DIALECTS, *STACKED_DIALECTS, *REFUSED_LAYOUTS)}
    assert set(STORAGES) == known | {"F32"}
    assert sorted(name for names in ROWS.values() for name in names) == sorted(STORAGES)


def test_deepseek_has_no_dense_layers() -> None:
    """So the column of the dense MLP is GLM's alone."""
    assert support.FAMILIES["deepseek_v4"].dense is None
    config, _ = support.small_model("deepseek_v4")
    with pytest.raises(Unsupported, match="mlp_layer_types.*'dense'"):
        family_of({**config, "mlp_layer_types": ["dense", "moe"]})


@pytest.mark.parametrize("part", support.PARTS)
def test_wrong_values_are_seen(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is off by 3 % in every weight."""
    right = STORAGES["BF16"]
    wrong = Storage(right.store, lambda tensors, base: right.values(tensors, base) * 1.03)
    monkeypatch.setitem(STORAGES, "BF16", wrong)
    with pytest.raises(AssertionError):
        outcome("BF16", part, "glm5_next", tmp_path / "checkpoint")


@pytest.mark.parametrize("part", ["routed experts", "shared expert", "dense MLP", "router"])
def test_wrong_bits_of_the_model_are_seen(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negative(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return -y

    def load(folder: Path, progress: bool) -> nn.Module:
        model = load_model(folder, progress=progress)
        for _, module, _ in blocks(model):
            module.register_forward_hook(negative)
        return model

    monkeypatch.setattr(support, "load_model", load)
    with pytest.raises(AssertionError, match=f"BF16, {part}, glm5_next"):
        outcome("BF16", part, "glm5_next", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("unknown layout", "is not named in"),
        ("model.language_model.layers.1.mlp has a bad day", "no known refusal"),
    ],
)
def test_a_refusal_says_what_and_why(
    message: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **settings: object) -> None:
        raise CheckpointError(message)

    monkeypatch.setattr(support, "load_layer", load)
    with pytest.raises(AssertionError, match=problem):
        outcome("F32", "routed experts", "glm5_next", tmp_path / "checkpoint")


def test_a_model_that_takes_what_the_layer_refuses_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(folder: Path, layer: int, numerics: str | None = None) -> None:
        raise CheckpointError(f"{support.FAMILIES['glm5_next'].moe}: unknown layout")

    assert outcome("BF16", "router", "glm5_next", tmp_path / "checkpoint") == Outcome("yes")
    monkeypatch.setattr(support, "load_layer", load)
    with pytest.raises(AssertionError, match="which load_layer refuses"):
        outcome("BF16", "router", "glm5_next", tmp_path / "checkpoint")
