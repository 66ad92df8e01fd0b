"""Known answers on a card: every path of a case agrees, near the CPU's values; the stored bytes."""

import pytest
import torch

from exactmoe.errors import Unsupported
from exactmoe.plan import architecture_name
from exactmoe.proof.known_answers import CASES, file_of, known_answers, read_files
from exactmoe.proof.known_answers.file import answers_on
from layers import assert_same_bits, relative_l2

QUICK = ("a16 nvfp4 sigmoid shared limit, sizes 256 and 384", "a8 mxfp4 hash, bf16 output")


def card(device: str) -> torch.device:
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_paths_agree(device, case):
    stored = read_files()["cpu"][case.name]
    try:
        found = answers_on(case, "auto", card(device))
    except Unsupported as error:
        pytest.skip(str(error))
    first, *others = found.values()
    assert first.inputs == stored.inputs
    for answer in others:
        assert_same_bits(answer.y, first.y, ", ".join(found))
    ordinary = slice(0, min(4, len(stored.y)))
    assert relative_l2(first.y[ordinary], stored.y[ordinary].double()) < 2.0**-4
    assert torch.equal(first.y.isnan(), stored.y.isnan())


@pytest.mark.gpu
@pytest.mark.slow
def test_stored_bytes():
    name = architecture_name(card("cuda"))
    if not file_of(name).is_file():
        pytest.skip(f"none are stored for {name}")
    known_answers("auto", device=card("cuda")).raise_on_mismatch()
