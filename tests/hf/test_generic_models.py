"""MoE models of other families: experts found by structure, run through our function, packed."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from exactmoe import quantize_experts
from exactmoe.errors import Unsupported
from exactmoe.hf import ExactMoEConfig, adapter, blocks, experts, explain

FIELDS = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 64,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
OWN = {
    "deepseek_v3": {"head_dim": 8},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
}
MODELS = [
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "granitemoe",
    "hy_v3",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
]


def tiny(model_type):
    """A tiny random model in bf16, its experts eager; skips where transformers has none such."""
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError:
        pytest.skip(f"this transformers has no {model_type}")
    fields = {name: value for name, value in FIELDS.items() if hasattr(known, name)}
    config = AutoConfig.for_model(model_type, **(fields | OWN.get(model_type, {})))
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return tiny(request.param)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def ids(rng):
    return torch.randint(1, 120, (1, 12), generator=rng)


def run(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def routes(rng, module, num_tokens):
    num_experts, _, columns = module.gate_up_proj.shape
    x = torch.randn(num_tokens, columns, generator=rng).bfloat16()
    chosen = torch.rand(num_tokens, num_experts, generator=rng).argsort(1)[:, :2]
    return x, chosen, torch.rand(num_tokens, 2, generator=rng)


def test_near_eager(model, ids):
    """Each experts module against transformers' eager one, on the inputs that it gets in a run.

    Relative L2, measured 0.004 to 0.005: eager rounds after every operation. (Logits say less: a
    rounding makes a bf16 router choose other experts.)
    """
    model.set_experts_implementation("eager")
    seen = []

    def keep(module, given, output):
        seen.append((module, given, output))

    modules = [module for module in model.modules() if adapter.is_experts(module)]
    hooks = [module.register_forward_hook(keep) for module in modules]
    run(model, ids)
    for hook in hooks:
        hook.remove()
    assert [module for module, _, _ in seen] == modules != []
    model.set_experts_implementation("exactmoe")
    for module, given, expected in seen:
        with torch.no_grad():
            found = module(*given)
        assert 0 < (found - expected).float().norm() / expected.float().norm() < 0.01
        assert module in experts._layers


def test_generates(model, ids):
    model.set_experts_implementation("exactmoe")
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] == ids.shape[1] + 3
    names = [name for name, _ in experts.modules(model)]
    assert explain(model).count("routed experts only") == len(names) > 0


def test_chunks_have_the_same_bits(model, rng):
    model.set_experts_implementation("exactmoe")
    _, module = experts.modules(model)[-1]
    given = routes(rng, module, 23)
    with torch.no_grad():
        whole = module(*given)
        for size in (1, 2, 5):
            pieces = [module(*(t[i : i + size] for t in given)) for i in range(0, 23, size)]
            assert torch.cat(pieces).view(torch.int16).equal(whole.view(torch.int16)), size


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_quantised_saved_and_loaded(model, ids, tmp_path, format):
    model.save_pretrained(tmp_path / "bf16")
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", quantization_config=ExactMoEConfig(format)
    )
    assert not blocks(packed)
    modules = experts.modules(packed)
    assert len(modules) == sum(adapter.is_experts(m) for m in model.modules())
    assert all(m.gate_up_proj.element_size() == 1 for _, m in modules)
    assert explain(packed).count(f"{format}, class a16") == len(modules)
    originals = [module for module in model.modules() if adapter.is_experts(module)]
    for (_, module), unpacked in zip(modules, originals, strict=True):
        gate, up = unpacked.gate_up_proj.detach().chunk(2, 1)
        quantised = quantize_experts(gate, up, unpacked.down_proj.detach(), format)
        bank = experts.layer_of(module, 2).bank
        for name, buffer in quantised.named_buffers():
            assert getattr(bank, name).equal(buffer), name
    expected = run(packed, ids)
    original = run(model, ids).float()
    assert (expected.float() - original).norm() / original.norm() < 0.6
    packed.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert run(again, ids).equal(expected)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_oss", r"GptOssExperts has is_transposed = True; .*nothing here adds a bias"),
        ("nemotron_h", r"NemotronHExperts has has_gate = False; .*experts without a gate"),
    ],
)
def test_other_experts_are_refused_with_the_reason(model_type, reason, ids, tmp_path):
    model = tiny(model_type)
    model.set_experts_implementation("exactmoe")
    with pytest.raises(Unsupported, match=reason):
        run(model, ids)
    model.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=reason):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ExactMoEConfig("nvfp4"))
