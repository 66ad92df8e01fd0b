"""save_pretrained of a model that load_model loaded: names, dtypes and bytes of its checkpoint.

test_load_layouts.py does the same for every layout.
"""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactmoe import load_layer
from exactmoe.bank import Partition, SplitBank
from exactmoe.checkpoint import Checkpoint
from exactmoe.errors import CheckpointError, Unsupported
from exactmoe.hf import blocks, load_model, save_model
from exactmoe.hf.saving import _to_save, read
from layers import random_bank
from saved_bytes import assert_same_tensors, assert_saves_as, tensors_in


def load(folder):
    return load_model(folder, progress=False)


def test_the_checkpoint_comes_back(model, checkpoint, tmp_path, token_ids):
    assert_saves_as(model, checkpoint, tmp_path)
    again = load(tmp_path)
    assert again(input_ids=token_ids).logits.equal(model(input_ids=token_ids).logits)
    assert_saves_as(again, checkpoint, tmp_path / "again")


def test_the_config_comes_back(model, checkpoint, tmp_path):
    model.save_pretrained(tmp_path)
    published = json.loads((checkpoint / "config.json").read_text())
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved.get(name) for name in published} == published
    assert Checkpoint(tmp_path).family == Checkpoint(checkpoint).family


def test_shards_of_the_size_asked_for(model, checkpoint, tmp_path):
    """Views of one parameter are separate tensors for transformers' sharding."""
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 4
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors_in(checkpoint))
    largest = max(t.nbytes for t in tensors_in(checkpoint).values())
    assert max(file.stat().st_size for file in shards) < 100_000 + largest + 20_000
    assert_same_tensors(tensors_in(tmp_path), tensors_in(checkpoint))


def test_saving_copies_no_expert(model, checkpoint):
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    own = {}
    for _, block, _ in blocks(model):
        for p in block.parameters():
            own[p.data_ptr()] = p.nbytes
    routed = [n for n in state if re.search(r"experts\.\d+\..*(weight|scale)$", n)]
    routed = [n for n in routed if state[n].ndim == 2]
    assert len(routed) == 8 * 3 * 2 * (3 if "mlp" in routed[0] else 4)
    for name in routed:
        place = state[name].data_ptr()
        assert any(start <= place < start + size for start, size in own.items()), name
        assert state[name].untyped_storage().nbytes() == state[name].nbytes


def test_changed_values_are_saved(model, checkpoint, tmp_path, family):
    changed = copy.deepcopy(model)
    _, block, _ = blocks(changed)[1]
    with torch.no_grad():
        block.experts.down_proj.data[3, 5, 7] ^= 0x11
        changed.get_decoder().norm.weight.data[0] = 3.0
    changed.save_pretrained(tmp_path)
    before, after = tensors_in(checkpoint), tensors_in(tmp_path)
    word = "down_proj" if family == "glm5_next" else "w2"
    differ = [n for n, t in before.items() if not t.float().equal(after[n].float())]
    assert len(differ) == 2
    assert any(re.search(rf"layers\.1\..*experts\.3\.{word}\.weight$", name) for name in differ)
    assert load_layer(tmp_path, 1).bank.down.codes.equal(block.experts.down_proj.view(torch.uint8))


def mtp_and_scales(family):
    """Tensors that nobody loads, as published checkpoints have them."""

    def change(tensors):
        if family == "glm5_next":
            prefix = "model.language_model.layers"
            tensors[f"{prefix}.4.mlp.experts.0.gate_proj.weight"] = torch.randn(32, 64).bfloat16()
            tensors[f"{prefix}.3.self_attn.k_scale"] = torch.tensor(0.25)
        else:
            tensors["mtp.0.ffn.experts.0.w1.weight"] = torch.randn(128, 128).bfloat16()
            tensors["layers.3.ffn.experts.2.w1.input_scale"] = torch.tensor(0.25)

    return change


def one_mtp_layer(config):
    config.get("text_config", config)["num_nextn_predict_layers"] = 1


def test_tensors_that_nobody_loads_come_back(family, write, tmp_path):
    folder = write(change=mtp_and_scales(family), config_change=one_mtp_layer)
    assert_saves_as(load(folder), folder, tmp_path / "saved")


def test_without_the_files_they_cannot(family, write, tmp_path):
    folder = write(change=mtp_and_scales(family), config_change=one_mtp_layer)
    loaded = load(folder)
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"safetensors: .* is needed again for saving"):
        loaded.save_pretrained(tmp_path / "saved")
    shutil.copytree(moved, folder)
    assert_saves_as(loaded, folder, tmp_path / "saved")


def test_files_that_hold_something_else_now_are_refused(family, write, tmp_path):
    folder = write(change=mtp_and_scales(family), config_change=one_mtp_layer)
    loaded = load(folder)
    name = sorted(loaded.hf_quantizer.origin.unread)[0]
    file = folder / loaded.hf_quantizer.origin.checkpoint.tensors[name].file
    save_file(load_file(file) | {name: torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is F32 \[3\] now; it was "):
        loaded.save_pretrained(tmp_path / "saved")


def test_what_is_read_again_keeps_no_file_mapped(checkpoint):
    infos = list(Checkpoint(checkpoint).tensors.values())
    found = read(checkpoint, infos)
    assert len(found) == len(infos)
    assert str(checkpoint) not in Path("/proc/self/maps").read_text()


def test_a_parameter_that_the_checkpoint_has_not_is_refused(model, tmp_path):
    changed = copy.deepcopy(model)
    changed.get_decoder().norm.extra = torch.nn.Parameter(torch.ones(3).bfloat16())
    said = r"cannot be saved as .* was: .*norm\.extra is not in the checkpoint"
    with pytest.raises(CheckpointError, match=said):
        changed.save_pretrained(tmp_path / "saved")


def test_parameters_without_memory_cannot_be_saved(model, tmp_path):
    changed = copy.deepcopy(model)
    norm = changed.get_decoder().norm
    norm.weight = torch.nn.Parameter(norm.weight.to("meta"))
    with pytest.raises(Unsupported, match="parameters are offloaded; allowed for saving"):
        save_model(changed, tmp_path / "saved")


def test_a_float32_tensor_that_was_rounded_comes_back(family, write, tmp_path):
    """transformers loads it in bfloat16: the file has the bits that the model has lost."""
    end = (
        "layers.3.self_attn.q_a_proj.weight"
        if family == "glm5_next"
        else "layers.3.attn.wq_a.weight"
    )

    def widen(tensors):
        name = next(name for name in tensors if name.endswith(end))
        tensors[name] = tensors[name].float() * (1 + 2**-12)

    folder = write(change=widen)
    loaded = load(folder)
    assert_saves_as(loaded, folder, tmp_path / "saved")
    weight = loaded.get_decoder().layers[3].self_attn.q_a_proj.weight
    weight.data.neg_()
    loaded.save_pretrained(tmp_path / "negated")
    saved = next(t for n, t in tensors_in(tmp_path / "negated").items() if n.endswith(end))
    assert saved.dtype == torch.float32 and saved.equal(weight.float())


def test_a_copy_and_a_cast_model_save_alike(model, checkpoint, tmp_path):
    assert_saves_as(copy.deepcopy(model), checkpoint, tmp_path)


PARTS = ("codes", "scales", "global_scale")


@pytest.fixture
def to_host(monkeypatch):
    """The tensors that were asked to go to the host since, by address."""
    asked, real = [], torch.Tensor.cpu

    def cpu(tensor):
        asked.append(tensor.data_ptr())
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return asked


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_arranged_experts_are_saved_over_the_host(rng, to_host, name):
    """Their canonical copies would fill the card; those in canonical order are no copies."""
    bank = random_bank(rng, "nvfp4", 2, 128, 128)
    own = bank.packed(name)
    before = {part: getattr(own, part).clone() for part in PARTS}
    saved = _to_save(bank, name)
    assert all(getattr(saved, part) is getattr(own, part) for part in PARTS) and not to_host
    bank.arrange("fragment")
    assert not bank.get_buffer(f"{name}_codes").equal(before["codes"])
    saved = _to_save(bank, name)
    assert all(getattr(saved, part).equal(before[part]) for part in PARTS)
    assert len(to_host) == len(PARTS) and own.codes.data_ptr() not in to_host


def test_experts_of_two_cards_are_saved_over_the_host(rng, to_host, monkeypatch):
    bank = random_bank(rng, "nvfp4", 4, 128, 128)
    own = bank.packed("down")
    split = bank.split(Partition.of_lists([[0, 3], [1, 2]], 4), ("cpu", "cpu"), keep=True)
    to_host.clear()
    for cards, count in ((("cpu", "cpu"), 0), (("cuda:0", "cuda:1"), len(PARTS))):
        monkeypatch.setattr(SplitBank, "cards", cards)
        saved = _to_save(split, "down")
        assert len(to_host) == count
        assert all(getattr(saved, part).equal(getattr(own, part)) for part in PARTS)
