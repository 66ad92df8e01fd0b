"""Compiled kernels on disk: found again, never half written, never trusted blindly."""

import logging

import pytest

from exactmoe.kernels.cuda.disk import folder, kept


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EXACTMOE_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def never():
    raise AssertionError("compiled again")


def test_code_is_compiled_once_a_source(cache):
    assert folder() == cache
    assert kept("one", lambda: b"code 1") == b"code 1"
    assert kept("two", lambda: b"code 2") == b"code 2"
    assert kept("one", never) == b"code 1"
    assert sorted(path.suffix for path in cache.iterdir()) == [".cubin", ".cubin"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b""])
def test_a_damaged_file_is_compiled_again(cache, damage):
    kept("one", lambda: b"code 1")
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert kept("one", lambda: b"code 3") == b"code 3"
    assert kept("one", never) == b"code 3"


def test_a_folder_that_cannot_be_written_is_said_and_costs_nothing(cache, caplog):
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="exactmoe"):
        assert kept("one", lambda: b"code 1") == b"code 1"
    assert "EXACTMOE_CACHE names another folder" in caplog.text


def test_the_default_folder_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("EXACTMOE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "exactmoe"
