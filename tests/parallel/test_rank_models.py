"""Whole models over ranks: the text of one process, and only the bytes that a rank owns."""

import copy
import os
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from exactmoe.bank import Partition
from exactmoe.errors import ConfigError, ExactMoEError
from exactmoe.parallel.rank_wire import RankPlacement
from exactmoe.parallel.ranks import Ranks
from rank_processes import SIZES

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODELS = ("glm5_next", "deepseek_v4")
PROMPT = "def parse_lines(path):\n    result = {}\n    with open(path) as handle:\n"


def written(name: str, ranks: Ranks | RankPlacement | None) -> tuple[tuple[int, ...], Any]:
    from exactmoe.hf import load_model
    from exactmoe.hf.text import generate, load_tokenizer, prompt_ids, quiet

    quiet()
    model = load_model(str(DEMO / name), progress=False, ranks=ranks)
    tokenizer = load_tokenizer(str(DEMO / name))
    return generate(model, tokenizer, prompt_ids(tokenizer, PROMPT), 12).token_ids, model


@cache
def in_one_process(name: str) -> tuple[tuple[int, ...], Any]:
    """As `written`, once a process: tests do not change the model."""
    return written(name, None)


def over_ranks(ranks: Ranks, name: str) -> dict[str, Any]:
    from exactmoe.hf import blocks, explain
    from exactmoe.layer import MoELayer

    alone, whole = in_one_process(name)
    tokens, model = written(name, ranks)
    layers = {index: layer for index, _, layer in blocks(model)}
    before = {index: layer for index, _, layer in blocks(whole)}
    moe = [index for index, layer in layers.items() if isinstance(layer, MoELayer)]
    return {
        "alone": alone,
        "tokens": tokens,
        "bytes": sum(layers[i].bank.nbytes for i in moe) / sum(before[i].bank.nbytes for i in moe),
        "parameters": memory_of(model) / memory_of(whole),
        "explain": explain(model),
        "saving": refusal(lambda: model.save_pretrained("nowhere")),
        "rewritten": generate_again(model, name),
    }


def memory_of(model: Any) -> int:
    return sum(p.nbytes for n, p in model.named_parameters() if ".mlp." in n)


def generate_again(model: Any, name: str) -> tuple[int, ...]:
    """A copy of the model is over the same ranks, with memory of its own."""
    from exactmoe.hf.text import generate, load_tokenizer, prompt_ids

    tokenizer = load_tokenizer(str(DEMO / name))
    twin = copy.deepcopy(model)
    return generate(twin, tokenizer, prompt_ids(tokenizer, PROMPT), 4).token_ids


def refusal(call) -> str:
    try:
        call()
    except ExactMoEError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


# Both models, and all numbers of ranks; the other pairs are left to make test-long.
SOME = {("glm5_next", 2), ("deepseek_v4", 3), ("glm5_next", 4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(*pair, marks=() if pair in SOME else pytest.mark.long)
        for pair in product(MODELS, SIZES)
    ],
)
def test_the_text_of_one_process(pool, name, size):
    found = pool.run(over_ranks, size, name)
    for rank, one in enumerate(found):
        assert one["tokens"] == one["alone"] == found[0]["alone"]
        assert len(one["tokens"]) == 12
        assert one["rewritten"] == one["alone"][:4]
        assert one["bytes"] < 1 / size + 0.1
        assert one["parameters"] < 1 / size + 0.25
        assert f"{size} ranks, even over {size}" in one["explain"]
        assert f"rank {rank}: " in one["explain"] and "this process (gloo, cpu)" in one["explain"]
        assert one["saving"].startswith(f"Unsupported: the model lies over {size} ranks")
    assert sum(one["bytes"] for one in found) == pytest.approx(1.0)


def read_by(ranks: Ranks) -> tuple[int, int]:
    """Bytes that the files gave, and those of the closed form."""
    from exactmoe.checkpoint import Checkpoint, Reader, plan_layer
    from exactmoe.hf import load_model, rank_blocks

    counted = []
    start = Reader.__init__

    def counting(self: Any, checkpoint: Any, progress: Any = None) -> None:
        start(self, checkpoint, counted.append)

    Reader.__init__ = counting
    try:
        owners = tuple(int(expert < 3) for expert in range(24))
        placement = RankPlacement(ranks, Partition(owners), "slots", cut_dense=False)
        load_model(str(DEMO / "deepseek_v4"), progress=False, ranks=placement)
    finally:
        Reader.__init__ = start
    checkpoint = Checkpoint(DEMO / "deepseek_v4")
    plans = [plan_layer(checkpoint, layer) for layer in range(checkpoint.family.num_layers)]
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    return sum(counted), rank_blocks.bytes_read(placement, plans, total)


def test_a_rank_reads_what_it_owns(pool):
    (many, told), (few, told_few) = pool.run(read_by, 2)
    assert (many, few) == (told, told_few)
    assert few < 0.6 * many


def disagreeing(ranks: Ranks, what: str) -> str:
    from exactmoe.hf import load_model

    second = ranks.rank == 1
    name, settings = "deepseek_v4", {}
    if what == "checkpoint":
        name = MODELS[not second]
    elif what == "numerics":
        settings["numerics"] = "a16" if second else "a8"
    elif what == "cut_dense":
        ranks = RankPlacement(ranks, cut_dense=second)
    elif what == "missing" and second:
        name = "gone"
    elif what == "partition":
        ranks = RankPlacement(ranks, Partition((0, 1) * 12) if second else None)
    elif what == "reserve":
        settings["kv_reserve"] = "1GiB"
    elif what == "cards":
        settings["cards"] = ("cpu", "cpu")
    return refusal(lambda: load_model(str(DEMO / name), progress=False, ranks=ranks, **settings))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("checkpoint", ": the ranks disagree about the checkpoint (config.json, names, dtypes, "),
        ("numerics", "disagree about the numerics: rank 0: {'activation': 'a8'"),
        ("cut_dense", "disagree about cut_dense: rank 0: False; rank 1: True"),
        ("partition", "disagree about the partition: rank 0: (0, 0, "),
        ("missing", "RankLost: another rank has failed: rank 1: CheckpointError: "),
        ("cards", "Unsupported: ranks were asked for with Placement(cards=('cpu', 'cpu')"),
        ("reserve", "Unsupported: kv_reserve is '1GiB'; allowed over ranks: 0"),
    ],
)
def test_ranks_that_ask_for_other_models(pool, what, named):
    first, second = pool.run(disagreeing, 2, what)
    assert named in first
    if what == "missing":
        assert second.startswith("CheckpointError: ") and "gone" in second


def test_auto_without_torchrun():
    from exactmoe.hf import load_model

    for ranks, said in (("auto", "torch.distributed is not initialised"), (2, "ranks is 2")):
        with pytest.raises(ConfigError, match=said):
            load_model(str(DEMO / "deepseek_v4"), ranks=ranks)
