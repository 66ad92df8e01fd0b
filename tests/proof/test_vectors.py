"""Vectors of a layer, and their comparison with another machine's."""

import json
from dataclasses import replace

import pytest
import torch

from exactmoe.errors import CheckpointError
from exactmoe.proof import Agreement, Other, vectors_of
from exactmoe.proof.vectors import ALLOWED, DIFFERS, EQUAL, NOT_COMPARED, TOKENS
from small_layers import small_dense, small_layer

HERE = {"architecture": "cpu", "contract": 1}


@pytest.fixture
def made(rng):
    return vectors_of(small_layer(rng, "hash"), "layer 3")


def other(vectors, **machine):
    return Other("theirs.json", {**HERE, **machine}, vectors)


def one(found, *, theirs=None, **machine):
    """The first comparison of `found` with changed copies of it."""
    agreement = Agreement.of(HERE, found, other(found if theirs is None else theirs, **machine))
    return agreement, agreement.compared[0]


def changed(found, **parts):
    name = next(iter(found))
    return {**found, name: replace(found[name], **parts)}


def test_each_entry_has_one(rng, made):
    assert list(made) == ["layer 3, block", "layer 3, experts"]
    assert list(vectors_of(small_dense(rng), "d")) == ["d, dense"]
    block = made["layer 3, block"]
    assert len(block.rows) == TOKENS
    assert (block.dtype, block.nbytes) == ("bfloat16", TOKENS * 64 * 2)


@pytest.mark.parametrize("numerics", ["a16", "a8"])
def test_backends_of_a_cpu_give_the_same(numerics):
    layers = [
        small_layer(torch.Generator().manual_seed(5), numerics=numerics, backend=backend)
        for backend in ("cpu", "reference")
    ]
    first, second = (vectors_of(layer, "it") for layer in layers)
    assert first == second
    agreement, compared = one(first, theirs=second)
    assert agreement.ok and compared.result == EQUAL
    assert agreement.nbytes == sum(vector.nbytes for vector in first.values())


def test_a_seed_changes_inputs_and_rows(rng):
    layer = small_layer(rng)
    first, second = vectors_of(layer, "it"), vectors_of(layer, "it", seed=1)
    assert first == vectors_of(layer, "it")
    for name, vector in first.items():
        assert vector.inputs != second[name].inputs
        assert vector.rows != second[name].rows


@pytest.mark.parametrize("part", ["bank", "router", "shared"])
def test_another_weight_changes_the_inputs(rng, part):
    layer = small_layer(rng)
    before = vectors_of(layer, "it")
    buffer = next(layer.get_submodule(part).buffers())
    raw = buffer.view(torch.uint8).view(-1)
    raw[0] ^= 1
    after = vectors_of(layer, "it")
    for name, vector in before.items():
        assert vector.inputs != after[name].inputs


def test_one_row_that_differs_on_the_same_architecture_is_a_failure(made):
    rows = made["layer 3, block"].rows
    theirs = changed(made, rows=(*rows[:5], "0" * 64, *rows[6:]))
    agreement, compared = one(made, theirs=theirs)
    assert not agreement.ok
    assert compared.result == DIFFERS
    assert str(compared) == "layer 3, block: DIFFERS (1 of 16 rows, first 5)"
    assert agreement.counts() == {DIFFERS: 1, EQUAL: 1}


def test_on_another_architecture_it_may_differ(made):
    theirs = changed(made, rows=("0" * 64,) * TOKENS)
    agreement, compared = one(made, theirs=theirs, architecture="sm_90")
    assert agreement.ok
    assert compared.result == ALLOWED
    assert "the architectures differ" in compared.reason


@pytest.mark.parametrize(
    ("parts", "machine", "reason"),
    [
        ({"inputs": "0" * 64}, {}, "another checkpoint, or --seed"),
        ({"dtype": "float32"}, {}, "16 rows bfloat16 here, 16 float32 there"),
        ({"rows": ("0" * 64,)}, {}, "16 rows bfloat16 here, 1 bfloat16 there"),
        ({}, {"contract": 2}, "contract version 1 here, 2 there"),
    ],
)
def test_what_cannot_be_compared(made, parts, machine, reason):
    _, compared = one(made, theirs=changed(made, **parts), **machine)
    assert compared.result == NOT_COMPARED
    assert reason in compared.reason
    assert compared.nbytes == 0


def test_nothing_compared_is_no_agreement(made):
    assert not one(made, contract=2)[0].ok
    theirs = {f"other {name}": vector for name, vector in made.items()}
    agreement, compared = one(made, theirs=theirs)
    assert not agreement.ok
    assert [c.reason for c in agreement.compared] == ["only here"] * 2 + ["only there"] * 2


def test_the_file_of_another_machine(made, tmp_path):
    path = tmp_path / "theirs.json"
    vectors = {name: vector.to_dict() for name, vector in made.items()}
    path.write_text(json.dumps({"machine": HERE, "vectors": vectors}))
    assert Other.read(path).vectors == made
    for bad in (
        "{",
        "[]",
        '{"machine": {}, "vectors": {}}',
        json.dumps({"machine": HERE, "vectors": {"a": {"inputs": 1}}}),
        json.dumps({"machine": HERE, "vectors": {"a": {**vectors["layer 3, block"], "rows": []}}}),
    ):
        path.write_text(bad)
        with pytest.raises(CheckpointError, match="is no report of `exactmoe verify --json`"):
            Other.read(path)
    path.write_text(json.dumps({"machine": HERE, "vectors": {}}))
    with pytest.raises(CheckpointError, match="holds no vectors"):
        Other.read(path)


def test_the_driver_of_a_card(monkeypatch, tmp_path):
    from exactmoe.proof import machine

    file = tmp_path / "version"
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", file)
    assert machine._driver() == "unknown"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug\nGCC: 12.3")
    assert machine._driver() == "580.82.07"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1  Release Build")
    assert machine._driver() == "570.1"
