"""What one request may ask for, and how many may wait."""

from dataclasses import dataclass

from exactmoe.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServeLimits:
    """Limits of a server.

    Attributes:
        queue: requests that may wait while one runs; 0: none waits.
        prompt_tokens: of one request.
        total_tokens: prompt and answer of one request.
        timeout: seconds from the arrival of a request to its last token, waiting included.
        body_bytes: of the body of a request.
        grace: seconds that requests may still take after a signal to stop.
    """

    queue: int
    prompt_tokens: int
    total_tokens: int
    timeout: float = 600.0
    body_bytes: int = 4 * MIB
    grace: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("queue", 0), ("prompt_tokens", 1), ("body_bytes", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}; allowed: from {least}")
        if self.total_tokens <= self.prompt_tokens:
            raise ConfigError(
                f"total_tokens is {self.total_tokens}, prompt_tokens {self.prompt_tokens}; "
                "allowed: more in total than in the prompt"
            )
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout is {self.timeout}; allowed: above 0 seconds")
        if not 0 <= self.grace < float("inf"):
            raise ConfigError(f"grace is {self.grace}; allowed: from 0 seconds")


def token_limits(
    prompt_tokens: int | None, total_tokens: int | None, positions: int | None
) -> tuple[int, int]:
    """(prompt_tokens, total_tokens) of a model with so many positions; None: as many as it has.

    Raises:
        ConfigError: more in total than the model has positions for, or nothing that says how many.
    """
    if total_tokens is None:
        if positions is None:
            raise ConfigError(
                "the model's config has no max_position_embeddings; give --max-total-tokens"
            )
        total_tokens = positions
    if positions is not None and total_tokens > positions:
        raise ConfigError(
            f"--max-total-tokens is {total_tokens}; allowed: at most the model's {positions} "
            "positions"
        )
    return total_tokens - 1 if prompt_tokens is None else prompt_tokens, total_tokens
