"""Greedy continuations of held-out text, judged by Python's `tokenize`."""

import io
import re
import tokenize
from dataclasses import dataclass

import torch
from corpus import EOS_ID, heldout_texts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT_TOKENS = 96
NEW_TOKENS = 64
NUM_PROMPTS = 50
OUTCOMES = ("accepted", "incomplete", "refused")


@dataclass(frozen=True)
class Prompt:
    """Held-out text from a top-level `def` or `class` on, `PROMPT_TOKENS` tokens long (bos
    included).
    """

    source: str
    token_ids: tuple[int, ...]


def outcome(text: str) -> str:
    """One of `OUTCOMES` for `text` up to its last line break.

    "incomplete": the text ends inside an open bracket or triple-quoted string, which may be the
    cut's fault. It is counted by itself, and never as accepted.
    """
    lines = text[: text.rfind("\n") + 1]
    try:
        kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(lines).readline)]
    except tokenize.TokenError as error:
        return "incomplete" if "EOF in multi-line" in str(error) else "refused"
    except (IndentationError, SyntaxError):
        return "refused"
    return "refused" if tokenize.ERRORTOKEN in kinds else "accepted"


def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """`NUM_PROMPTS` prompts spread evenly over the held-out files.

    A start counts only if `tokenize` accepts the prompt (it does not end inside a bracket or
    docstring) and the file itself cut where a continuation is cut: so the ceiling is 100 %.
    """
    candidates = []
    for source, text in heldout_texts().items():
        for start in re.finditer(r"^(?:def|class) ", text, re.MULTILINE):
            ids = tokenizer(text[start.start() : start.start() + 4000])["input_ids"]
            cut = ids[: PROMPT_TOKENS + NEW_TOKENS]
            wholes = (tokenizer.decode(cut[1:PROMPT_TOKENS]), tokenizer.decode(cut[1:]))
            if len(cut) == PROMPT_TOKENS + NEW_TOKENS and all(
                outcome(whole) == "accepted" for whole in wholes
            ):
                candidates.append(Prompt(source, tuple(ids[:PROMPT_TOKENS])))
    if len(candidates) < NUM_PROMPTS:
        raise ValueError(f"need {NUM_PROMPTS} prompts, the held-out files give {len(candidates)}")
    return [candidates[index * len(candidates) // NUM_PROMPTS] for index in range(NUM_PROMPTS)]


@torch.no_grad()
def continue_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chosen: list[Prompt]
) -> list[dict[str, str]]:
    """Source, prompt, continuation and outcome of each prompt; all prompts have one length, so no
    padding.
    """
    ids = torch.tensor([prompt.token_ids for prompt in chosen], device=model.device)
    made = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[
        :, PROMPT_TOKENS:
    ].tolist()
    results = []
    for prompt, row in zip(chosen, made, strict=True):
        row = row[: row.index(EOS_ID)] if EOS_ID in row else row
        start, more = tokenizer.decode(prompt.token_ids[1:]), tokenizer.decode(row)
        results.append(
            {
                "source": prompt.source,
                "prompt": start,
                "continuation": more,
                "outcome": outcome(start + more),
            }
        )
    return results


def tally(results: list[dict[str, str]]) -> dict[str, int]:
    """Outcome -> number of continuations."""
    return {kind: sum(result["outcome"] == kind for result in results) for kind in OUTCOMES}
