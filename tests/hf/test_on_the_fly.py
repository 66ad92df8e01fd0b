"""`quantization_config=ExactMoEConfig(...)`: bytes of quantize_experts, one expert at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, core_model_loading

from exactmoe import load_layer, quantize_experts
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.hf import ExactMoEConfig, adapter, blocks, explain, load_model, one_by_one
from saved_bytes import assert_same_tensors, tensors_in

SETTINGS = [("nvfp4", None), ("nvfp4", "four_over_six"), ("mxfp4", None), ("mxfp4", "no_clip")]


def load(folder, *config, **arguments):
    quantization = {"quantization_config": ExactMoEConfig(*config)} if config else {}
    auto = adapter.auto_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, **quantization, **arguments)


@pytest.fixture(scope="module")
def source(family, sources):
    return sources[family]


@pytest.fixture(scope="module", params=["nvfp4", "mxfp4"])
def packed(request, source):
    """Tests do not change it."""
    return load(source, request.param)


def moe_blocks(model):
    return [(i, block, layer) for i, block, layer in blocks(model) if hasattr(block, "experts")]


def run(model, token_ids):
    return model(input_ids=token_ids).logits


@pytest.mark.parametrize(("format", "rule"), SETTINGS)
def test_bytes_of_quantize_experts(source, format, rule):
    auto = adapter.auto_class(AutoConfig.from_pretrained(source))
    original = auto.from_pretrained(source, dtype=torch.bfloat16)
    layers = adapter.decoder_layers(original)
    found = moe_blocks(load(source, format, rule))
    assert len(found) in (3, 4)
    for index, _, layer in found:
        experts = layers[index].mlp.experts
        gate, up = experts.gate_up_proj.detach().chunk(2, 1)
        expected = quantize_experts(gate, up, experts.down_proj.detach(), format, rule)
        for name, buffer in expected.named_buffers():
            assert getattr(layer.bank, name).equal(buffer), (index, name)


def test_whole_blocks_run(packed, family):
    text = explain(packed)
    assert text.count("whole block") == 4
    assert text.count("a8" if family == "deepseek_v4" else "a16") >= 3


def test_saved_and_loaded_again(packed, tmp_path, token_ids):
    """By load_model, load_layer and from_pretrained, with the same bits."""
    packed.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == {
        "quant_method": "exactmoe",
        "format": packed.hf_quantizer.quantization_config.format,
        "rule": None,
        "numerics": None,
    }
    expected = run(packed, token_ids)
    again, stock = load_model(tmp_path, progress=False), load(tmp_path)
    assert run(again, token_ids).equal(expected)
    assert run(stock, token_ids).equal(expected)
    for index, _, layer in moe_blocks(packed):
        for name, buffer in load_layer(tmp_path, index).bank.named_buffers():
            assert getattr(layer.bank, name).equal(buffer)
    for number, model in enumerate((again, stock)):
        model.save_pretrained(tmp_path / f"{number}")
        assert_same_tensors(tensors_in(tmp_path / f"{number}"), tensors_in(tmp_path))


def test_everything_else_is_saved_as_it_was(packed, source, tmp_path):
    """As by transformers itself, which keeps some tensors of a bf16 checkpoint in float32."""
    packed.save_pretrained(tmp_path / "packed")
    load(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    before, after = tensors_in(tmp_path / "bf16"), tensors_in(tmp_path / "packed")
    same = [name for name in before if ".experts." not in name]
    assert_same_tensors({n: after[n] for n in same}, {n: before[n] for n in same})
    assert {n for n in after if ".experts." not in n} == set(same)


def test_one_expert_at_a_time(source, monkeypatch):
    """Each projection of each expert is read when it is quantised, and nothing in between."""
    events = []
    put, read = one_by_one.Stack.put, core_model_loading._materialize_copy

    def watch_put(self, expert, projection, weight):
        events.append(("put", tuple(weight.shape)))
        put(self, expert, projection, weight)

    def watch_read(*arguments):
        tensor = read(*arguments)
        events.append(("read", tuple(tensor.shape)))
        return tensor

    monkeypatch.setattr(one_by_one.Stack, "put", watch_put)
    monkeypatch.setattr(core_model_loading, "_materialize_copy", watch_read)
    model = load(source, "nvfp4")
    puts = [i for i, (kind, _) in enumerate(events) if kind == "put"]
    assert len(puts) == len(moe_blocks(model)) * 8 * 3
    for i in puts:
        assert events[i - 1] == ("read", events[i][1]) and len(events[i][1]) == 2


def test_numerics_are_chosen(source, family, token_ids):
    for numerics in ("a16", "a8"):
        if (family, numerics) == ("glm5_next", "a8"):
            with pytest.raises(Unsupported, match="class a8 needs multiples of 128"):
                load(source, "nvfp4", None, numerics)
            continue
        model = load(source, "nvfp4", None, numerics)
        assert all(layer.numerics.activation == numerics for _, _, layer in moe_blocks(model))


def test_no_parameter_asks_for_a_gradient(packed, token_ids):
    assert not any(p.requires_grad for p in packed.parameters())
    block = blocks(packed)[-1][1]
    x = torch.zeros(1, 2, packed.config.get_text_config().hidden_size, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="the call needs gradients"):
        block(x.requires_grad_())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "fp8"}, "'fp8'; allowed: nvfp4, mxfp4"),
        ({"format": "nvfp4", "rule": "ocp"}, "rule is 'ocp'; allowed: modelopt, four_over_six"),
        ({"format": "nvfp4", "numerics": "a4"}, "'a4'"),
        ({"format": "nvfp4", "bits": 4}, "bits is not known; allowed: format, rule, numerics"),
    ],
)
def test_wrong_settings(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ExactMoEConfig(**arguments)


def test_other_dtypes_are_refused(source):
    with pytest.raises(Unsupported, match="dtype is torch.float32; allowed: torch.bfloat16"):
        load(source, "nvfp4", dtype=torch.float32)


def changed(source, folder, change):
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def an_expert(tensors):
    return next(n for n in sorted(tensors) if ".experts.5." in n and ".1." in n)


def test_a_value_that_is_not_finite_is_named(source, tmp_path):
    def change(tensors):
        tensors[an_expert(tensors)][3, 7] = float("nan")

    message = r"layers\.1\.mlp\.experts\.\w+, .*experts\.5\..*: weight is nan at .*row 3, column 7"
    with pytest.raises(CheckpointError, match=message):
        load(changed(source, tmp_path / "nan", change), "nvfp4")


def test_a_missing_expert_is_named(source, tmp_path):
    def change(tensors):
        del tensors[an_expert(tensors)]

    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\..*: 7 experts; allowed: 8"
    ):
        load(changed(source, tmp_path / "seven", change), "mxfp4")


def test_missing_experts_are_named(source, tmp_path):
    def change(tensors):
        for name in [n for n in tensors if ".experts." in n and "layers.2." in n]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.gate_up_proj is missing"):
        load(changed(source, tmp_path / "none", change), "mxfp4")


def test_missing_tensors_of_a_saved_model_are_named(packed, tmp_path):
    packed.save_pretrained(tmp_path / "saved")

    def change(tensors):
        for name in [n for n in tensors if ".experts." in n and "layers.2." in n]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.gate_up_proj is missing"):
        load(changed(tmp_path / "saved", tmp_path / "none", change))


def test_a_model_without_experts_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="LlamaForCausalLM has no experts module"):
        load(tmp_path, "nvfp4")
