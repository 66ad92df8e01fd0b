"""Streaming into a model: each byte is read once, to the card that owns it."""

import _thread
import copy
import io
import itertools
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exactmoe import Placement, load_layer
from exactmoe.bank import SplitBank
from exactmoe.checkpoint import Checkpoint, Reader, Share, plan_layer, shares_of
from exactmoe.checkpoint.files import Files
from exactmoe.checkpoint.model_bytes import of_config
from exactmoe.checkpoint.reader import Pending
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.fitting import partition_for
from exactmoe.hf import blocks, load_model, streaming
from exactmoe.hf import load as loading
from exactmoe.runtime import free_memory
from published_configs import glm_5_3_flash
from saved_bytes import assert_same_tensors, assert_saves_as

CPU = torch.device("cpu")
LISTS = ([0, 3, 5], [1, 2, 4, 6, 7])
OWNERS = tuple(int(expert in LISTS[1]) for expert in range(8))


@pytest.fixture
def apart(monkeypatch):
    """Two cards of the host as if each had memory of its own, as two GPUs have."""
    monkeypatch.setattr(loading, "shares_on", lambda devices, p: shares_of(p, devices))
    return lambda folder, **how: load_model(
        folder, cards=Placement(("cpu", "cpu"), OWNERS), progress=False, **how
    )


def experts_of(model):
    return [block.experts for _, block, _ in blocks(model) if hasattr(block, "experts")]


def joined(runs):
    """Runs of bytes (file, start, end) as the longest ones that cover the same."""
    found = []
    for file, start, end in sorted(runs):
        if found and found[-1][0] == file and found[-1][2] >= start:
            found[-1][2] = max(end, found[-1][2])
        else:
            found.append([file, start, end])
    return found


def test_each_byte_is_read_once(checkpoint, monkeypatch):
    read, runs = Files.read, []

    def noted(self, info, start, *into):
        runs.append((info.file, start, start + sum(map(len, into))))
        read(self, info, start, *into)

    monkeypatch.setattr(Files, "read", noted)
    load_model(checkpoint, progress=False)
    tensors = [t for t in Checkpoint(checkpoint).tensors.values() if "input_scale" not in t.name]
    assert joined((t.file, t.offset, t.offset + t.nbytes) for t in tensors) == joined(runs)
    assert sum(t.nbytes for t in tensors) == sum(end - start for _, start, end in runs)


def test_cards_with_memory_of_their_own(apart, model, checkpoint, token_ids):
    several = apart(checkpoint)
    assert several(input_ids=token_ids).logits.equal(model(input_ids=token_ids).logits)
    for _, block, layer in blocks(several):
        if not hasattr(block, "experts"):
            continue
        assert isinstance(layer.bank, SplitBank) and layer.bank.partition.owners == OWNERS
        for card, owned in enumerate(LISTS):
            own = layer.bank[card].gate_codes
            module = getattr(block.experts, f"card_{card}") if card else block.experts
            assert own.untyped_storage().data_ptr() == module.gate_up_proj.data_ptr()
            assert len(module.gate_up_proj) == len(own) == len(owned)


def test_split_experts_have_the_state_dict_of_whole_ones(apart, model, checkpoint, token_ids):
    several = apart(checkpoint)
    found = several.state_dict()
    assert list(found) == list(model.state_dict())
    assert_same_tensors(found, model.state_dict())
    # ... and take it back.
    changed = {n: t.clone() for n, t in found.items()}
    name = next(n for n in changed if n.endswith("experts.down_proj"))
    changed[name].view(torch.uint8)[6, 2, 1] ^= 0x11
    several.load_state_dict(changed)
    assert_same_tensors(several.state_dict(), changed)
    assert (
        experts_of(several)[0].card_1.down_proj.view(torch.uint8)[3, 2, 1]
        == (changed[name].view(torch.uint8)[6, 2, 1])
    )


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to"])
def test_split_experts_move_with_their_model(apart, model, checkpoint, token_ids, how):
    several = apart(checkpoint)
    if how == "deepcopy":
        several = copy.deepcopy(several)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(several, file)
        file.seek(0)
        several = torch.load(file, weights_only=False)
    else:
        several.to("cpu")
    assert several(input_ids=token_ids).logits.equal(model(input_ids=token_ids).logits)
    assert all(len(e.card_1.down_proj) == len(LISTS[1]) for e in experts_of(several))


def test_a_split_model_saves_as_its_checkpoint(apart, checkpoint, tmp_path):
    assert_saves_as(apart(checkpoint), checkpoint, tmp_path)


def test_fit_is_by_free_memory(checkpoint, monkeypatch, model, token_ids):
    """Dense parts are on the first card, so it takes fewer experts, and fewer with a reserve."""
    counts = []
    for free, reserve in ((40 << 20, 0), (40 << 20, "8MiB"), (40 << 20, (0, 8 << 20))):
        monkeypatch.setattr("exactmoe.fitting.free_bytes", lambda device, free=free: free)
        several = load_model(
            checkpoint,
            cards=Placement(("cpu", "cpu"), "fit"),
            limits=None,
            kv_reserve=reserve,
            progress=False,
        )
        layer = blocks(several)[-1][2]
        counts.append(layer.bank.partition.counts)
        assert several(input_ids=token_ids).logits.equal(model(input_ids=token_ids).logits)
        assert "fit, with" in str(layer.explain(1))
    plain, first, second = counts
    assert first[0] < plain[0] <= 4 and second[0] > plain[0]


def test_what_does_not_fit_is_refused_before_anything_is_read(checkpoint, monkeypatch):
    monkeypatch.setattr("exactmoe.fitting.free_bytes", lambda device: 100 << 10)
    monkeypatch.setattr(Files, "read", None)
    with pytest.raises(Unsupported) as refused:
        load_model(checkpoint, progress=False)
    text = str(refused.value)
    assert "does not fit" in text and "are missing" in text and "would fit: " in text
    assert "card 0, cpu: 0.1 MiB free" in text


@pytest.mark.parametrize("reserve", [-1, "many", (1, 2, 3), 1.5, True])
def test_reserves_that_are_refused(checkpoint, reserve):
    with pytest.raises(ConfigError, match="kv_reserve is"):
        load_model(checkpoint, kv_reserve=reserve, progress=False)


def test_fit_of_one_layer(checkpoint, monkeypatch, rng):
    monkeypatch.setattr("exactmoe.fitting.free_bytes", lambda device: 40 << 20)
    fitted = load_layer(checkpoint, 3, cards=Placement(("cpu", "cpu"), "fit"))
    one = load_layer(checkpoint, 3)
    x = torch.randn(3, one.config.hidden_size, generator=rng).bfloat16()
    assert fitted.bank.partition.rule.startswith("fit") and fitted(x).equal(one(x))


def test_cards_of_one_device_share_a_parameter(checkpoint):
    several = load_model(checkpoint, cards=("cpu", "cpu"), progress=False)
    for experts in experts_of(several):
        assert len(experts.gate_up_proj) == 8 and not hasattr(experts, "card_1")


def test_two_layers_are_on_their_way_at_most(checkpoint, monkeypatch):
    """Values of a layer are checked while the next one comes, not at the end."""
    begin, finish, begun, most = Reader.begin, Pending.finish, [0], [0]

    def counted(self, *given):
        pendings = begin(self, *given)
        begun[0] += len(pendings)
        most[0] = max(most[0], begun[0])
        return pendings

    def ended(self):
        begun[0] -= 1
        return finish(self)

    monkeypatch.setattr(Reader, "begin", counted)
    monkeypatch.setattr(Pending, "finish", ended)
    load_model(checkpoint, progress=False)
    assert begun == [0] and most[0] <= 2 * 3


def test_sizes_of_another_model_are_refused(checkpoint, model):
    """transformers' config may ask for other sizes than the files have."""
    opened = Checkpoint(checkpoint)
    layer = opened.family.num_layers - 1
    experts = experts_of(copy.deepcopy(model))[-1]
    taken = streaming.without_parameters(experts)
    count, rows, columns = taken["down_proj"].shape
    taken["down_proj"] = torch.empty(count, rows, columns + 16, dtype=taken["down_proj"].dtype)
    plans = [plan_layer(opened, layer)]
    said = rf"the model of transformers asks for \({count}, {rows}, {columns + 16}\)"
    with Reader(opened) as reader, pytest.raises(CheckpointError, match=said):
        streaming.fill_experts(reader, {layer: experts}, {layer: taken}, plans, (Share(CPU),))


def test_an_interrupt_leaves_nothing(checkpoint, monkeypatch):
    read, count = Files.read, itertools.count(1)

    def stopped(self, info, start, *into):
        if next(count) == 40:
            _thread.interrupt_main()
            time.sleep(0.2)
        read(self, info, start, *into)

    monkeypatch.setattr(Files, "read", stopped)
    with pytest.raises(KeyboardInterrupt):
        load_model(checkpoint, progress=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(
        t.name.startswith("exactmoe-reader") for t in threading.enumerate()
    ):
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name.startswith("exactmoe-reader")]
    opened = [os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    assert not [path for path in opened if path.startswith(str(checkpoint))]


def test_free_memory_of_the_host(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    assert free_memory.free_bytes(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_memory.free_bytes(CPU) == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.free_bytes(CPU) == 5000 * 1024
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "nothing")
    assert free_memory.free_bytes(CPU) is None


def test_two_cards_of_96_gib_take_glm_unevenly(monkeypatch, tmp_path):
    """As `exactmoe plan` says (tests/report/test_plan.py), from what the cards have free."""
    (tmp_path / "config.json").write_text(json.dumps(glm_5_3_flash()))
    model = replace(of_config(tmp_path / "config.json", format="nvfp4"), other_bytes=15 * 10**9)
    free = {torch.device("cuda", 0): 96 << 30, torch.device("cuda", 1): 96 << 30}
    monkeypatch.setattr("exactmoe.fitting.free_bytes", free.__getitem__)
    partition = partition_for(model, Placement(("cuda:0", "cuda:1")), list(free), None, 0)
    assert partition.counts[0] < 144 < partition.counts[1]
    even = Placement(("cuda:0", "cuda:1"), "even")
    assert partition_for(model, even, list(free), None, 0).counts == (144, 144)
    free[torch.device("cuda", 1)] = 60 << 30
    with pytest.raises(Unsupported, match=r"card 1, cuda:1: 60.00 GiB free.*[\s\S]*3 cards"):
        partition_for(model, Placement(("cuda:0", "cuda:1")), list(free), None, 0)
