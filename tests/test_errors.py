"""The error types: what they are caught as, and that they survive pickling between processes."""

import pickle

import pytest

from exactmoe.errors import (
    BitMismatch,
    CheckpointError,
    ConfigError,
    ExactMoEError,
    RankLost,
    Unsupported,
)

KINDS = [
    (ConfigError, ValueError),
    (CheckpointError, Exception),
    (Unsupported, NotImplementedError),
    (BitMismatch, AssertionError),
    (RankLost, RuntimeError),
]


@pytest.mark.parametrize(("error", "builtin"), KINDS)
def test_caught_as_ours_and_as_the_builtin(error, builtin):
    for kind in (ExactMoEError, builtin):
        with pytest.raises(kind, match="k is 24; allowed: 32"):
            raise error("k is 24; allowed: 32")


@pytest.mark.parametrize("error", [kind for kind, _ in KINDS])
def test_pickle_keeps_type_and_message(error):
    copy = pickle.loads(pickle.dumps(error("k is 24; allowed: 32")))
    assert type(copy) is error
    assert str(copy) == "k is 24; allowed: 32"


def test_unsupported_carries_its_reason():
    copy = pickle.loads(pickle.dumps(Unsupported("no fp8 row for sm_80")))
    assert (copy.reason, str(copy)) == ("no fp8 row for sm_80", "no fp8 row for sm_80")


def test_no_error_is_another():
    kinds = [kind for kind, _ in KINDS]
    assert [a for a in kinds for b in kinds if a is not b and issubclass(a, b)] == []
