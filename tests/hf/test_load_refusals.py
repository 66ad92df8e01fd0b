"""What load_model refuses or ignores; its errors name the tensor, the value and what is allowed."""

import copy
import re

import pytest
import torch

from exactmoe import Numerics, load_layer
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.hf import blocks, load_model


def load(folder, **arguments):
    return load_model(folder, progress=False, **arguments)


def without(suffix):
    """A change that removes the first tensor whose name ends with `suffix`."""

    def change(tensors):
        del tensors[next(name for name in sorted(tensors) if name.endswith(suffix))]

    return change


def missing(family):
    """(suffix of the tensor to remove, name that the error must say)."""
    if family == "glm5_next":
        return [
            ("layers.2.mlp.experts.5.up_proj.weight", "layers.2.mlp.experts.5.up_proj.weight"),
            ("layers.1.mlp.experts.0.down_proj.weight_scale_2", "0.down_proj.weight_scale_2"),
            ("layers.1.mlp.gate.e_score_correction_bias", "gate.e_score_correction_bias"),
            ("layers.3.self_attn.q_a_proj.weight", "layers.3.self_attn.q_a_proj.weight is missing"),
        ]
    return [
        ("layers.2.ffn.experts.5.w3.weight", "layers.2.ffn.experts.5.w3.weight"),
        ("layers.1.ffn.experts.0.w2.scale", "layers.1.ffn.experts.0.w2.scale"),
        ("layers.0.ffn.gate.tid2eid", "layers.0.ffn.gate.tid2eid"),
        ("layers.3.attn.wq_a.weight", "layers.3.self_attn.q_a_proj.weight is missing"),
    ]


@pytest.mark.parametrize("which", range(4))
def test_a_missing_tensor_is_named(family, write, which):
    suffix, said = missing(family)[which]
    with pytest.raises(CheckpointError, match=said.replace(".", r"\.")):
        load(write(change=without(suffix)))


def test_a_tensor_that_nobody_reads_is_named(family, write):
    name = "model.language_model.layers.1.self_attn.extra.weight"
    if family == "deepseek_v4":
        name = "layers.1.attn.extra.weight"
    with pytest.raises(CheckpointError, match=r"self_attn\.extra\.weight is no parameter"):
        load(write(change=lambda tensors: tensors.update({name: torch.zeros(4).bfloat16()})))


def test_a_wrong_shape_outside_the_blocks_is_named(family, write):
    name = "model.language_model.norm.weight" if family == "glm5_next" else "norm.weight"
    with pytest.raises(CheckpointError, match=r"norm\.weight is \(3,\), the model asks for \("):
        load(write(change=lambda tensors: tensors.update({name: torch.ones(3).bfloat16()})))


def test_a_byte_that_is_refused_is_named(family, write):
    """A block scale of NaN, of an expert of the last layer: file, tensor, expert, row and block."""
    word = "w3.scale" if family == "deepseek_v4" else "up_proj.weight_scale"
    suffix = rf"layers\.3\..*experts\.5\.{word}"

    def spoil(tensors):
        name = next(name for name in tensors if re.search(f"{suffix}$", name))
        tensors[name].view(torch.uint8)[2, 1] = 0xFF

    said = rf"safetensors: .*{suffix}: .*expert 5, row 2, block 1"
    with pytest.raises(CheckpointError, match=said):
        load(write(change=spoil))


def test_fp8_attention_without_scales_is_refused(family, write):
    def quantise_attention(tensors):
        attention = r"layers\.1\.(self_attn\.q_proj|attn\.wq_a)\.weight$"
        name = next(name for name in sorted(tensors) if re.search(attention, name))
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    with pytest.raises(CheckpointError, match=r"F8_E4M3 .* has no scales beside it; known: FP8"):
        load(write(change=quantise_attention))


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
@pytest.mark.parametrize("bad", [-1, 8])
def test_a_table_id_that_no_expert_has_is_named(write, family, bad):
    def change(tensors):
        tensors["layers.0.ffn.gate.tid2eid"][17, 1] = bad

    said = rf"layers\.0\.ffn\.gate\.tid2eid \(layer 0\): table row 17, column 1 is {bad}; allowed"
    with pytest.raises(CheckpointError, match=said):
        load(write(change=change))


@pytest.mark.parametrize("family", ["deepseek_v4"], indirect=True)
def test_a_table_may_repeat_an_id(write, family, token_ids):
    """transformers' own random models have all rows [0, 0]."""

    def change(tensors):
        tensors["layers.0.ffn.gate.tid2eid"][:] = 3

    folder = write(change=change)
    model = load(folder)
    index, block, layer = blocks(model)[0]
    x = torch.ones(1, 5, 128).bfloat16()
    found = block(x, input_ids=token_ids[:, :5])[0]
    assert found.equal(load_layer(folder, index)(x[0], token_ids=token_ids[0, :5]))
    assert layer.route(x[0], token_ids[0, :5])[0].tolist() == [[3, 3]] * 5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_are_refused(write, dtype):
    def change(config):
        config["dtype"] = dtype

    with pytest.raises(Unsupported, match=f"dtype is '{dtype}'; allowed: 'bfloat16'"):
        load(write(config_change=change))


def test_ignored_tensors_do_not_disturb(family, write, model, token_ids, caplog):
    """MTP layers, key-value scales: by named rule, whatever transformers renames them to."""

    def add(tensors):
        scalar = torch.tensor(1.0)
        if family == "glm5_next":
            prefix = "model.language_model.layers"
            tensors[f"{prefix}.4.mlp.experts.0.gate_proj.weight"] = torch.zeros(32, 64).bfloat16()
            tensors[f"{prefix}.3.self_attn.k_scale"] = scalar
        else:
            tensors["mtp.0.ffn.experts.0.w1.weight"] = torch.zeros(128, 128).bfloat16()
            tensors["layers.3.ffn.experts.2.w1.input_scale"] = scalar
            tensors["layers.3.attn.kv_scale"] = scalar

    def one_mtp_layer(config):
        config.get("text_config", config)["num_nextn_predict_layers"] = 1

    loaded = load(write(change=add, config_change=one_mtp_layer))
    assert loaded(input_ids=token_ids).logits.equal(model(input_ids=token_ids).logits)
    assert "UNEXPECTED" not in caplog.text


def test_packed_dense_parts(family, write, rng):
    """Dense MLP and shared experts packed too (NVIDIA's GLM export), global scales as [1]."""

    def packed(name):
        mlp = r"layers.*\.(mlp|ffn)\..*((gate|up|down)_proj|w[123])\.weight$"
        return re.search(mlp, name) is not None

    def scalars_as_vectors(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale_2")]:
            tensors[name] = tensors[name].reshape(1)

    folder = write(packed=packed, change=scalars_as_vectors)
    model = load(folder)
    for index, block, layer in blocks(model):
        dense = getattr(block, "shared_experts", block)
        assert dense.gate_proj.weight.dtype in (torch.uint8, torch.int8)
        x = torch.randn(7, dense.gate_proj.in_features, generator=rng).bfloat16()
        ids = torch.randint(0, 256, (7,), generator=rng)
        expected = load_layer(folder, index)
        hash_layer = getattr(getattr(layer, "router", None), "table", None) is not None
        inputs = {"token_ids": ids} if hash_layer else {}
        found = block(x[None], **({"input_ids": ids[None]} if hash_layer else {}))
        assert found[0].equal(expected(x, **inputs))


def test_a_float32_router_is_not_rounded(family, write, rng):
    def widen(tensors):
        for name in [n for n in tensors if n.endswith("gate.weight")]:
            tensors[name] = tensors[name].float() * (1 + 2**-12)

    folder = write(change=widen)
    for index, block, layer in blocks(load(folder)):
        if not hasattr(block, "gate"):
            continue
        expected = load_layer(folder, index).router.weight
        assert not expected.equal(expected.bfloat16().float())
        assert layer.router.weight.dtype == torch.float32
        assert layer.router.weight.equal(expected)


def test_router_logits_are_refused(model, token_ids):
    with pytest.raises(Unsupported, match="output_router_logits is True; allowed: False"):
        model(input_ids=token_ids, output_router_logits=True)
    asking = copy.deepcopy(model)
    asking.config.get_text_config().output_router_logits = True
    with pytest.raises(Unsupported, match="output_router_logits is True; allowed: False"):
        asking(input_ids=token_ids)


def test_more_cards_than_experts_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"num_cards is 99 for \d+ experts"):
        load(checkpoint, cards=("cpu",) * 99)


def test_a_float32_output_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"numerics.output is 'f32'; .* takes 'bf16'"):
        load(checkpoint, numerics=Numerics(output="f32"))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"nowhere is not a folder; allowed: a folder, or a hub id"
    ):
        load(tmp_path / "nowhere")


def test_the_empty_text_is_not_the_current_folder(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint)
    with pytest.raises(
        CheckpointError, match="path is '', the empty text; allowed: a folder, or a hub id"
    ):
        load("")


def test_a_hub_id_without_the_hub_is_named():
    with pytest.raises(
        CheckpointError, match="exactmoe-tests/none is no folder here and cannot be had"
    ):
        load("exactmoe-tests/none")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_progress(checkpoint, capfd, monkeypatch, terminal, progress):
    """A bar with bytes, rate and remaining time, on a terminal only; transformers' own never."""
    from transformers.utils import logging

    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    load_model(checkpoint, progress=progress)
    shown = capfd.readouterr().err
    if terminal and progress:
        assert f"loading {checkpoint.name}" in shown
        assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? [kM]B", shown) and "B/s" in shown
        assert "remaining" in shown
    else:
        assert shown == ""
    assert logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if before else logging.disable_progress_bar)()
