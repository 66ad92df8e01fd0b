"""The model behind a server: its name, its facts, and requests as token ids."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactmoe.errors import ConfigError
from exactmoe.hf.text import chat_ids, has_chat_template, num_positions, prompt_ids
from exactmoe.serve.limits import ServeLimits
from exactmoe.serve.problems import bad_request
from exactmoe.serve.requests import Message, TextRequest

# Files of a checkpoint whose bytes go into the fingerprint; of weight files only name and size do.
_READ = (".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A loaded model as its clients see it.

    Attributes:
        name: that requests give.
        model: of transformers.
        tokenizer: for prompts; the engine has one of its own.
        fingerprint: `system_fingerprint` of every answer: equal ones and equal requests give equal
            texts.
        facts: of model and machine, plain values.
    """

    name: str
    model: Any
    tokenizer: Any
    fingerprint: str
    facts: dict[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def positions(self) -> int | None:
        """Tokens that the model has positions for."""
        return num_positions(self.model)

    @property
    def has_chat(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return has_chat_template(self.tokenizer)

    def prompt(self, prompt: str | list[int]) -> Tensor:
        """Token ids int64 [1, T] of a completion's prompt; Problem names `prompt`."""
        if isinstance(prompt, str):
            try:
                return prompt_ids(self.tokenizer, prompt)
            except ConfigError as error:
                raise bad_request(str(error), "prompt") from error
        size = self.model.get_input_embeddings().num_embeddings
        wrong = [token for token in prompt if not 0 <= token < size]
        if wrong or not prompt:
            told = f"token id {wrong[0]}" if wrong else "no token"
            raise bad_request(f"prompt has {told}; allowed: ids from 0 to {size - 1}", "prompt")
        return torch.tensor([prompt], dtype=torch.int64)

    def chat(self, messages: Sequence[Message]) -> Tensor:
        """Token ids int64 [1, T] of a chat; Problem names `messages`."""
        if not self.has_chat:
            raise bad_request(
                f"the tokenizer of {self.name} has no chat template; allowed: /v1/completions",
                "messages",
                "no_chat_template",
            )
        try:
            return chat_ids(self.tokenizer, [message.plain() for message in messages])
        except ConfigError as error:
            raise bad_request(str(error), "messages") from error

    def token_text(self, token_id: int) -> str | None:
        """One token as text; None for one that is no whole character by itself."""
        text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        return None if not text or "\ufffd" in text else text


def new_tokens(limits: ServeLimits, prompt_tokens: int, request: TextRequest) -> int:
    """Tokens that an answer may have: as asked, or what the limits leave; Problem for too many."""
    if prompt_tokens > limits.prompt_tokens:
        raise bad_request(
            f"{request.prompt_name} has {prompt_tokens} tokens; allowed: at most "
            f"{limits.prompt_tokens}",
            request.prompt_name,
            "context_length_exceeded",
        )
    left = limits.total_tokens - prompt_tokens
    name, asked = request.asked_tokens
    if asked is None:
        default = request.default_tokens
        return left if default is None else min(left, default)
    if asked > left:
        raise bad_request(
            f"{name} is {asked}; allowed: at most {left} after a prompt of {prompt_tokens} tokens "
            f"({limits.total_tokens} in total)",
            name,
            "context_length_exceeded",
        )
    return asked


def fingerprint(facts: dict[str, Any], folder: Path) -> str:
    """Of all that texts depend on beside the request: machine, programs, and the checkpoint.

    Small files of the checkpoint go in with their bytes, weight files with name and size.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            if path.suffix in _READ:
                digest.update(path.read_bytes())
    return f"fp_{digest.hexdigest()[:16]}"
