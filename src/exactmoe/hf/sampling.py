"""One text token by token: seeded choice, log-probabilities, and an end from outside.

transformers draws from torch's global generator, so what a seed gives there depends on everything
else in the process. Here each text has a generator of its own, and the choice is made on the CPU in
float64, where sums have one order: a logits processor leaves one token, which `generate` then takes
greedily. At temperature 0 there is no such processor, and the text is that of hf.text.generate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from exactmoe.errors import ConfigError
from exactmoe.hf.text import end_ids, greedy_settings
from exactmoe.hf.whole_block import blocks


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one text is made.

    Attributes:
        max_new_tokens: at most this many.
        temperature: 0 takes the likeliest token.
        top_p: share of the probability that tokens are drawn from, the likeliest first.
        seed: of the text's own generator, any 64-bit integer; without meaning at temperature 0.
        top_logprobs: likeliest tokens whose log-probability is wanted beside the token's own;
            None: no log-probability at all.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; allowed: from 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; allowed: above 0, at most 1")


@dataclass(frozen=True)
class NewToken:
    """A token as it comes.

    Attributes:
        id: of the token.
        is_end: it ends the text and is not part of it.
        logprob: natural logarithm of its probability, before temperature and top_p; None: not
            asked for.
        top: (id, log-probability) of the likeliest tokens, the likeliest first.
    """

    id: int
    is_end: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Keeps the log-probabilities of a step, and leaves only the token that the seed chooses."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.logprobs: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores float32 [1, V] on the model's device -> the same shape."""
        logits = scores[0].to("cpu", torch.float64)
        if self.sampling.top_logprobs is not None:
            self.logprobs = logits - logits.logsumexp(0)
        if self.sampling.temperature == 0.0:
            return scores
        chosen = choose(logits, self.sampling, self.generator)
        left = torch.full_like(scores, float("-inf"))
        left[0, chosen] = 0.0
        return left


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The token that one number of the generator chooses; logits float64 [V], temperature above 0.

    Tokens lie in the order of falling probability, equal ones by their id; the share top_p of the
    whole is kept, at least one token; the number picks a point of what is kept.
    """
    weights = ((logits - logits.max()) / sampling.temperature).exp()
    ordered, ids = weights.sort(descending=True, stable=True)
    upto = ordered.cumsum(0)
    if not torch.isfinite(upto[-1]):
        raise ArithmeticError("the model gave a logit that is NaN, or none that is finite")
    before = upto - ordered
    kept = int((before < sampling.top_p * upto[-1]).sum())
    point = torch.rand((), dtype=torch.float64, generator=generator) * upto[kept - 1]
    place = int(torch.searchsorted(upto[:kept], point, right=True))
    return int(ids[min(place, kept - 1)])


class _Watch(StoppingCriteria):  # type: ignore[misc]
    """Hands each token on, and asks whether to go on."""

    def __init__(
        self,
        end: list[int],
        chooser: _Chooser | None,
        on_token: Callable[[NewToken], bool],
    ) -> None:
        self.end, self.chooser, self.on_token = frozenset(end), chooser, on_token
        self.stop: str | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        """input_ids int64 [1, T], the new token last -> bool [1]: whether the text ends here."""
        token = self._token(int(input_ids[0, -1]))
        if token.is_end:
            self.stop = "eos"
        if not self.on_token(token) and self.stop is None:
            self.stop = "stopped"
        return torch.full((1,), self.stop is not None, device=input_ids.device)

    def _token(self, token_id: int) -> NewToken:
        is_end = token_id in self.end
        logprobs = None if self.chooser is None else self.chooser.logprobs
        if self.chooser is None or logprobs is None:
            return NewToken(token_id, is_end)
        count = self.chooser.sampling.top_logprobs or 0
        values, ids = logprobs.sort(descending=True, stable=True)
        top = tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
        return NewToken(token_id, is_end, float(logprobs[token_id]), top)


def sample(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    sampling: Sampling,
    on_token: Callable[[NewToken], bool],
    chunk: int | None = None,
) -> str:
    """Continue one prompt, and hand each new token on as it comes.

    Args:
        ids: int64 [1, T].
        on_token: called with each token; False ends the text.
        chunk: tokens of the prompt a forward call; None: all in one.

    Returns:
        "eos", "length", or "stopped".

    Raises:
        ConfigError: a count below 1, or more tokens than the model has positions for.
        ArithmeticError: the model gave logits that no token can be chosen from.
    """
    settings = greedy_settings(model, tokenizer, ids, sampling.max_new_tokens, chunk)
    plain = sampling.temperature == 0.0 and sampling.top_logprobs is None
    chooser = None if plain else _Chooser(sampling)
    watch = _Watch(end_ids(model, tokenizer), chooser, on_token)
    model.generate(
        logits_processor=LogitsProcessorList([] if chooser is None else [chooser]),
        stopping_criteria=StoppingCriteriaList([watch]),
        **settings,
    )
    return watch.stop or "length"


@contextmanager
def interruptible(model: Any, check: Callable[[], None]) -> Iterator[None]:
    """While it lasts, every MLP block of the model calls `check` before it runs.

    What `check` raises ends the call of the model: a long prompt can be given up in its middle.
    """
    handles = [
        block.register_forward_pre_hook(lambda module, arguments: check())
        for _, block, _ in blocks(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
