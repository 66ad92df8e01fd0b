"""What the fuzzer (tests/helpers/fuzz_checkpoints.py) calls a finding."""

import random
import time
from pathlib import Path

import pytest
import torch

import fuzz_checkpoints as fuzz
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.runtime.free_memory import no_room

MIB = 1 << 20


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """found(use): what the fuzzer says of one case, whose checkpoint is used so."""
    sound = fuzz.originals(tmp_path)

    def one(use) -> str | None:
        monkeypatch.setattr(fuzz, "use", use)
        return fuzz.case(0, sound, tmp_path)

    return one


def refuse(path: Path) -> None:
    raise CheckpointError("refused")


def taking(mebibytes: int):
    def use(path: Path) -> None:
        torch.ones(mebibytes * MIB, dtype=torch.uint8)
        refuse(path)

    return use


def test_a_refusal_is_none(found) -> None:
    assert found(refuse) is None
    assert found(lambda path: None) is None


def test_another_error_is_one(found) -> None:
    def use(path: Path) -> None:
        raise KeyError("weight")

    assert "KeyError: 'weight'" in found(use)


@pytest.mark.parametrize("seed", range(8))
def test_an_endless_file_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A second edit may meet the link to /dev/zero that the first one made."""
    (tmp_path / fuzz.SHARD).symlink_to("/dev/zero")
    copied: list[Path] = []
    monkeypatch.setattr(fuzz.shutil, "copy", lambda source, target: copied.append(source))
    fuzz._edit_folder(random.Random(seed), tmp_path / fuzz.SHARD)
    assert copied == []


def test_memory_of_each_case_counts_whatever_was_taken_before(found) -> None:
    """The process's largest size ever would hide the second and third."""
    for mebibytes in (160, 96, 64):
        (grown,) = (found(taking(mebibytes)).split(": ")[1].split(" MiB")[0],)
        assert mebibytes - 8 <= float(grown) <= mebibytes + 8
    assert found(taking(4)) is None


def test_memory_that_nobody_has_is_no_refusal(found) -> None:
    """A machine with more of it would have given it."""

    def use(path: Path) -> None:
        raise Unsupported(no_room(torch.device("cpu"), 2**50, "codes"))

    assert "has no room for codes" in found(use)


def test_its_own_time_counts_and_the_clock(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    monkeypatch.setattr(fuzz, "CLOCK_SECONDS", 0.5)

    def busy(path: Path) -> None:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass

    assert "s of its own" in found(busy)
    assert found(lambda path: time.sleep(0.1)) is None
    assert "s of its own" in found(lambda path: time.sleep(0.6))
