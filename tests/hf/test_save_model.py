"""save_model: the files of the checkpoint, byte by byte; by card; and what an error leaves."""

import copy
import json
import re
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from disk_events import DiskEvents
from exactmoe import Placement
from exactmoe.checkpoint import Checkpoint, Share, audit, plan_layer, read_layer, shares_of
from exactmoe.checkpoint.files import Files
from exactmoe.checkpoint.index import INDEX
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.hf import blocks, load_model, save_model
from exactmoe.hf import load as loading
from saved_bytes import assert_same_tensors, assert_written_as, tensors_in

CPU = torch.device("cpu")
OWNERS = (0, 1, 1, 0, 1, 0, 1, 1)


def load(folder, **how):
    return load_model(folder, progress=False, **how)


def test_the_files_come_back(write, tmp_path):
    """test_load_layouts.py does the same for every dialect."""
    folder = write()
    (folder / "tokenizer.json").write_text("{}")
    assert_written_as(load(folder), folder, tmp_path / "out")
    assert_written_as(load(folder, cards=("cpu", "cpu")), folder, tmp_path / "cards")


@pytest.mark.parametrize("by_card", [False, True])
def test_a_name_stands_for_bytes_that_are_there(write, tmp_path, monkeypatch, by_card):
    """A power cut at any moment leaves no half file; config.json is the last name of all. Progress
    counts each byte once.
    """
    folder, out, seen = write(), tmp_path / "out", []
    (folder / "tokenizer.json").write_text("{}")
    model = load(folder, cards=("cpu", "cpu"))

    @contextmanager
    def bar(show, nbytes, what):
        yield lambda done: seen.append((done, nbytes))

    monkeypatch.setattr("exactmoe.hf.writing.byte_bar", bar)
    events = DiskEvents(out, monkeypatch)
    save_model(model, out, by_card=by_card)
    events.require_safe()
    *shards, other, index, config = events.named
    assert (other, index, config) == ("tokenizer.json", INDEX, "config.json")
    assert sorted(shards) == sorted({i.file for i in Checkpoint(out).tensors.values()})
    nbytes = Checkpoint(folder).nbytes
    assert sum(done for done, _ in seen) == nbytes and {total for _, total in seen} == {nbytes}


@pytest.mark.parametrize("apart", [False, True])
def test_by_card(checkpoint, tmp_path, monkeypatch, apart):
    """Each card's experts in files of their own; together a checkpoint like any other."""
    if apart:
        monkeypatch.setattr(loading, "shares_on", lambda devices, p: shares_of(p, devices))
        placement = Placement(("cpu", "cpu"), OWNERS)
    else:
        placement = Placement(("cpu", "cpu"), "even")
    model = load(checkpoint, cards=placement)
    owners = blocks(model)[-1][2].placement.partition
    out = tmp_path / "out"
    save_model(model, out, by_card=True, progress=False)
    assert_same_tensors(tensors_in(out), tensors_in(checkpoint))
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        expert = re.search(r"layers\..*\.experts\.(\d+)\.", name)
        assert file.startswith(f"card{owners[int(expert[1])] if expert else 0}-"), name
    found = Checkpoint(out)
    audit(found).require_clean()
    # The second card reads its own files, and the first one's for what is not cut.
    opened, real = set(), Files.read

    def noted(self, info, start, *into):
        if ".experts." in info.name:
            opened.add(info.file.partition("-")[0])
        real(self, info, start, *into)

    monkeypatch.setattr(Files, "read", noted)
    owned = tuple(expert for expert, card in enumerate(owners) if card == 1)
    layer = found.family.num_layers - 1
    assert plan_layer(found, layer).experts
    read_layer(found, layer, shares=[Share(CPU, owned)])
    assert opened == {"card1"}


def test_one_card_cannot_be_cut(model, tmp_path):
    with pytest.raises(ConfigError, match="the model is on one card"):
        save_model(model, tmp_path / "out", by_card=True)
    assert not (tmp_path / "out").exists()


def test_changed_values_are_written(model, checkpoint, tmp_path):
    changed = copy.deepcopy(model)
    blocks(changed)[1][1].experts.down_proj.data.view(torch.uint8)[3, 5, 7] ^= 0x11
    save_model(changed, tmp_path / "out", progress=False)
    before, after = tensors_in(checkpoint), tensors_in(tmp_path / "out")
    assert sum(not t.float().equal(after[name].float()) for name, t in before.items()) == 1


def test_refusals_leave_nothing(model, write, checkpoint, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is there already; allowed: a folder that is new"):
        save_model(model, checkpoint)
    with pytest.raises(Unsupported, match="Linear was not loaded by load_model"):
        save_model(torch.nn.Linear(1, 1), tmp_path / "none")
    folder = write()
    loaded = load(folder)
    file = next(folder.glob("*.safetensors"))
    moved = file.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="is missing"):
        save_model(loaded, tmp_path / "out")
    moved.rename(file)
    monkeypatch.setattr("exactmoe.hf.writing.write_tensor", _stopped)
    with pytest.raises(KeyboardInterrupt):
        save_model(loaded, tmp_path / "again")
    assert not list((tmp_path / "again").iterdir())


def test_files_that_changed_since_the_load_are_refused(write, tmp_path):
    """The shards get the headers of the checkpoint, and what nobody loads comes out of it."""
    folder = write()
    loaded = load(folder)
    file = next(folder.glob("*.safetensors"))
    save_file(load_file(file), file, metadata={"more": "x" * 100})
    with pytest.raises(CheckpointError, match=f"{file.name} has changed since the model was load"):
        save_model(loaded, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_value_without_an_exact_form_is_refused(model, tmp_path):
    changed = copy.deepcopy(model)
    words = changed.get_input_embeddings()
    words.weight = torch.nn.Parameter(words.weight.float())
    words.weight.data[3, 2] = 1 + 2.0**-20
    with pytest.raises(Unsupported, match=r"embed.* is torch.float32 .*no exact form in"):
        save_model(changed, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_nobody_loads_is_copied_in_chunks_and_other_weights_are_not(
    write, tmp_path, monkeypatch
):
    monkeypatch.setattr("exactmoe.checkpoint.files._CHUNK", 3)
    folder = write()
    for name in ("old.bin", "old.gguf", ".hidden"):
        (folder / name).write_text("{}")
    save_model(load(folder), tmp_path / "out", progress=False)
    assert_same_tensors(tensors_in(tmp_path / "out"), tensors_in(folder))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {p.name for p in folder.iterdir()} - {"old.bin", "old.gguf", ".hidden"}


def _stopped(*arguments):
    raise KeyboardInterrupt


def test_the_empty_text_is_no_folder(write, tmp_path, monkeypatch):
    """Path("") is the current folder, which may be empty."""
    model = load(write())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="folder is '', the empty text; allowed: a folder"):
        save_model(model, "")
    assert not list((tmp_path / "here").iterdir())
