"""`exactmoe generate PATH --prompt TEXT`: greedy text from a packed checkpoint, as it comes."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from exactmoe.cli import INTERRUPTED, options
from exactmoe.cli.output import open_checkpoint, print_json
from exactmoe.cli.over_ranks import is_first
from exactmoe.dense import DenseMLP
from exactmoe.layer import MoELayer

_BF16_BYTES = 2


def command(
    path: options.Path,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    running: options.Running,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most this many.")] = 64,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's turn of the chat template.")
    ] = False,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Run the prompt in chunks of this many tokens.")
    ] = None,
) -> None:
    """Continue a prompt greedily, the experts packed in memory."""
    settings = running.settings(over_ranks=True)
    speaks = is_first(settings)
    checkpoint = open_checkpoint(path, running.numerics)
    folder = checkpoint.path
    # transformers takes seconds to import: what is wrong above is said at once.
    from exactmoe.hf import blocks, load_model
    from exactmoe.hf.text import check_positions_of, generate, load_tokenizer, prompt_ids, quiet

    if not running.debug:
        quiet()
    tokenizer = load_tokenizer(folder)
    ids = prompt_ids(tokenizer, prompt, chat)
    check_positions_of(checkpoint.config, ids.shape[1], max_new_tokens)
    model = load_model(str(folder), **settings, progress=speaks and not running.json)
    if speaks and not running.json and not chat:
        typer.echo(prompt, nl=False)

    def show(text: str) -> None:
        if speaks and not running.json:
            typer.echo(text, nl=False)

    made = generate(model, tokenizer, ids, max_new_tokens, chunk, show)
    layers = {index: layer for index, _, layer in blocks(model)}
    if not speaks:
        return
    if running.json:
        print_json({**_facts(made, layers), "chunk": chunk})
    else:
        held, as_bf16 = expert_bytes(layers.values())
        typer.echo()
        typer.echo(
            f"{_counted(made)}; experts {held / 1e6:.1f} MB in memory, "
            f"{as_bf16 / 1e6:.1f} MB as bf16",
            err=True,
        )
    if made.stop == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _counted(made: Any) -> str:
    """ "64 tokens (length), 37.1 tokens/s"; one token has no rate."""
    count = len(made.token_ids)
    rate = f", {made.tokens_per_second:.1f} tokens/s" if count > 1 else ""
    return f"{count} token{'s' * (count != 1)} ({made.stop}){rate}"


def _facts(made: Any, layers: dict[int, MoELayer | DenseMLP]) -> dict[str, Any]:
    """Plain values, for JSON: `made` is an hf.text.Generated."""
    held, as_bf16 = expert_bytes(layers.values())
    classes = {lay.numerics.activation for lay in layers.values() if isinstance(lay, MoELayer)}
    return {
        "text": made.text,
        "prompt_tokens": made.prompt_tokens,
        "new_tokens": len(made.token_ids),
        "stop": made.stop,
        "tokens_per_second": made.tokens_per_second,
        "prompt_seconds": made.prompt_seconds,
        "seconds": made.seconds,
        "expert_bytes_in_memory": held,
        "expert_bytes_bf16": as_bf16,
        "numerics": sorted(classes),
        "backend": sorted({layer.plan().backend for layer in layers.values()}),
        "explain": {
            str(index): layer.explain(made.prompt_tokens).to_dict()
            for index, layer in layers.items()
        },
    }


def expert_bytes(layers: Iterable[MoELayer | DenseMLP]) -> tuple[int, int]:
    """Bytes of the routed experts as they lie in memory, and as bf16."""
    banks = [layer.bank for layer in layers if isinstance(layer, MoELayer)]
    values = sum(
        weight.num_experts * weight.rows * weight.columns
        for bank in banks
        for weight in (bank.gate, bank.up, bank.down)
    )
    return sum(bank.nbytes for bank in banks), values * _BF16_BYTES
