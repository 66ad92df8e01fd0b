"""The errors of ExactMoE. Each message names the value, what it was, and what is allowed."""


class ExactMoEError(Exception):
    """Base of all errors that ExactMoE raises on purpose."""


class ConfigError(ExactMoEError, ValueError):
    """A value given by the caller (argument, config field, switch) is not allowed."""


class CheckpointError(ExactMoEError):
    """A checkpoint file, tensor or index is missing, malformed or unexpected."""


class Unsupported(ExactMoEError, NotImplementedError):
    """The request is well formed, but no path here can run it.

    Attributes:
        reason: why it cannot run, in one sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BitMismatch(ExactMoEError, AssertionError):
    """Two results that the bit contract declares equal differ in their bytes."""


class RankLost(ExactMoEError, RuntimeError):
    """A rank of torch.distributed died, failed or does not answer; the message says which."""
