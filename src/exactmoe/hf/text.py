"""Text in and out of a loaded model: tokenizer, chat template, greedy generation that streams.

transformers does the work: `generate` with a TextStreamer, and its `prefill_chunk_size` for a
prompt that runs in chunks (the caches of both families take that; they refuse assisted generation).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoTokenizer, TextStreamer
from transformers.utils import logging

from exactmoe.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Generated:
    """What one generation gave.

    Attributes:
        text: the new text, without special tokens.
        token_ids: the new tokens.
        prompt_tokens: tokens of the prompt.
        prompt_seconds: from the start to the first new token.
        seconds: from the start to the end.
        stop: "eos", "length", or "interrupted".
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    prompt_seconds: float
    seconds: float
    stop: str

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first one, per second of decoding; 0 when there is none."""
        decoding = self.seconds - self.prompt_seconds
        return (len(self.token_ids) - 1) / decoding if len(self.token_ids) > 1 else 0.0


@dataclass
class _Arrivals:
    """The tokens as they come, and when the first one did."""

    start: float
    token_ids: list[int] = field(default_factory=list)
    first: float | None = None


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Hands the text on as soon as it is final, and keeps the tokens."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], arrivals: _Arrivals) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.arrivals = on_text, arrivals

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            if self.arrivals.first is None:
                self.arrivals.first = time.perf_counter()
            self.arrivals.token_ids += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


def quiet() -> None:
    """Only transformers' errors are shown: on a CPU it recommends GPU packages at every start."""
    logging.set_verbosity_error()


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a checkpoint folder; CheckpointError when it has none that loads."""
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        # transformers tells it in several lines.
        told = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: no tokenizer can be loaded: {told}") from error


def prompt_ids(tokenizer: Any, prompt: str, chat: bool = False) -> Tensor:
    """Token ids int64 [1, T] of a prompt, as it is or as the user's turn of the chat template.

    Raises:
        ConfigError: no token comes out, or `chat` without a chat template.
    """
    if chat:
        if not has_chat_template(tokenizer):
            raise ConfigError("the tokenizer has no chat template; leave --chat out")
        return chat_ids(tokenizer, [{"role": "user", "content": prompt}])
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise ConfigError(f"prompt {prompt!r} has no token; allowed: at least one")
    return ids.long()


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a chat can be written as the text that the model was trained on."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Tensor:
    """Token ids int64 [1, T] of a chat, each message with a role and a content, and of the start of
    the answer.

    Raises:
        ConfigError: the chat template refuses the messages, or gives no token.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(f"the chat template refuses the messages: {error}") from error
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise ConfigError(f"the chat template gives no token for {len(messages)} messages")
    return ids.long()


def generate(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    max_new_tokens: int,
    chunk: int | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Generated:
    """Greedy continuation of one prompt. It ends at eos, at max_new_tokens, or at ctrl-C.

    Args:
        ids: int64 [1, T].
        max_new_tokens: at most this many.
        chunk: tokens of the prompt a forward call; None: all in one.
        on_text: called with each piece of text as it comes.

    Raises:
        ConfigError: a count below 1, or more tokens than the model has positions for.
    """
    settings = greedy_settings(model, tokenizer, ids, max_new_tokens, chunk)
    end = end_ids(model, tokenizer)
    arrivals = _Arrivals(time.perf_counter())
    streamer = _Streamer(tokenizer, on_text, arrivals)
    interrupted = False
    try:
        model.generate(streamer=streamer, **settings)
    except KeyboardInterrupt:
        interrupted = True
        streamer.end()
    finish = time.perf_counter()
    new = tuple(arrivals.token_ids)
    return Generated(
        text=tokenizer.decode(new, skip_special_tokens=True) if new else "",
        token_ids=new,
        prompt_tokens=ids.shape[1],
        prompt_seconds=(arrivals.first or finish) - arrivals.start,
        seconds=finish - arrivals.start,
        stop=_stop(interrupted, bool(new) and new[-1] in end),
    )


def greedy_settings(
    model: Any, tokenizer: Any, ids: Tensor, max_new_tokens: int, chunk: int | None = None
) -> dict[str, Any]:
    """Arguments of the model's `generate` that take the likeliest token of each step.

    Raises:
        ConfigError: a count below 1, or more tokens than the model has positions for.
    """
    _check_counts(model, ids.shape[1], max_new_tokens, chunk)
    return {
        "inputs": ids.to(model.device),
        "attention_mask": torch.ones_like(ids).to(model.device),
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "eos_token_id": end_ids(model, tokenizer) or None,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        **({} if chunk is None else {"prefill_chunk_size": chunk}),
    }


def same_text(
    model: Any, tokenizer: Any, ids: Tensor, max_new_tokens: int, chunks: Sequence[int]
) -> dict[int, bool]:
    """chunk -> whether the greedy text after the prompt in such chunks is that of the whole prompt.

    A fact about the whole model, attention and norms included; only the MLP blocks are exact.
    """
    whole = generate(model, tokenizer, ids, max_new_tokens).token_ids
    return {
        chunk: generate(model, tokenizer, ids, max_new_tokens, chunk).token_ids == whole
        for chunk in chunks
    }


def run_prompt(model: Any, ids: Tensor) -> Tensor:
    """One forward call of a whole prompt, ids int64 [1, T], without a cache -> logits [1, T, V].

    Raises:
        ConfigError: more tokens than the model has positions for.
    """
    check_positions(model, ids.shape[1])
    with torch.no_grad():
        return model(input_ids=ids.to(model.device), use_cache=False).logits  # type: ignore[no-any-return]


def check_positions(model: Any, prompt_tokens: int, new_tokens: int = 0) -> None:
    """ConfigError for more tokens than the model's max_position_embeddings."""
    _check_positions(num_positions(model), prompt_tokens, new_tokens)


def check_positions_of(config: Mapping[str, Any], prompt_tokens: int, new_tokens: int = 0) -> None:
    """The same by a config.json, before its model is loaded."""
    text = config.get("text_config") or config
    _check_positions(text.get("max_position_embeddings"), prompt_tokens, new_tokens)


def _check_positions(positions: int | None, prompt_tokens: int, new_tokens: int) -> None:
    if positions is not None and prompt_tokens + new_tokens > positions:
        asked = f" and {new_tokens} new ones are asked for" if new_tokens else ""
        raise ConfigError(
            f"the prompt has {prompt_tokens} tokens{asked}; the model has {positions} positions"
        )


def num_positions(model: Any) -> int | None:
    """Tokens that the model has positions for; None: its config doesn't say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _stop(interrupted: bool, at_end: bool) -> str:
    if interrupted:
        return "interrupted"
    return "eos" if at_end else "length"


def _check_counts(model: Any, prompt_tokens: int, new_tokens: int, chunk: int | None) -> None:
    for name, value in (("max_new_tokens", new_tokens), ("chunk", chunk)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; allowed: from 1")
    check_positions(model, prompt_tokens, new_tokens)


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text: of the generation config, else of the tokenizer."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)
