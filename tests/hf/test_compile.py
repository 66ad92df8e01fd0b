"""torch.compile(fullgraph=True) on experts modules and whole blocks: one operation, same bits."""

import copy

import pytest
import torch
from packaging.version import Version
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from exactmoe.errors import Unsupported
from exactmoe.hf import blocks

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="an older torch is refused under compile"
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    def __init__(self):
        self.targets = []

    def __call__(self, graph, inputs):
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        self.targets.append([str(node.target) for node in calls])
        return graph.forward


def compile(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def qwen_experts(rng):
    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
    )
    config._experts_implementation = "exactmoe"
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng).mul(0.1).bfloat16()
    return module.requires_grad_(False)


def call(rng, tokens):
    ids = torch.rand(tokens, 8, generator=rng).argsort(1)[:, :2]
    x = torch.randn(tokens, 64, generator=rng).bfloat16()
    return x, ids, torch.rand(tokens, 2, generator=rng)


def test_experts_module_is_one_operation(rng):
    module, counter = qwen_experts(rng), Counter()
    traced = compile(module, counter)
    for tokens in (3, 2, 40):
        given = call(rng, tokens)
        assert traced(*given).equal(module(*given))
    assert counter.targets == [["exactmoe.experts.default"]]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_experts_module(rng, backend):
    module, given = qwen_experts(rng), call(rng, 9)
    assert compile(module, backend)(*given).equal(module(*given))


def test_each_module_keeps_its_own_weights(rng):
    run = compile(lambda module, *given: module(*given))
    first, second, given = qwen_experts(rng), qwen_experts(rng), call(rng, 6)
    run(first, *given)
    copied = copy.deepcopy(first)
    copied.down_proj.data.neg_()
    for module in (first, second, copied, first):
        assert run(module, *given).equal(module(*given))
    before = run(first, *given)
    first.down_proj = torch.nn.Parameter(-first.down_proj, requires_grad=False)
    assert run(first, *given).equal(-before)


def test_gradients_are_refused(rng):
    module, (x, ids, weights) = qwen_experts(rng), call(rng, 4)
    with pytest.raises(Exception, match="the call needs gradients"):
        compile(module)(x.requires_grad_(), ids, weights)


def test_gradients_of_experts_are_refused(rng):
    """Frozen rows and trainable experts: without a refusal, nothing would learn and nobody know."""
    module, given = qwen_experts(rng), call(rng, 4)
    module.down_proj.requires_grad_()
    with pytest.raises(Unsupported, match="the call needs gradients"):
        module(*given)
    with torch.no_grad():
        module(*given)


def test_whole_blocks(model, rng):
    counter = Counter()
    for _, block, layer in blocks(model):
        hash_layer = getattr(getattr(layer, "router", None), "table", None) is not None
        traced = compile(block, counter)
        for tokens in (5, 12):
            x = torch.randn(1, tokens, layer.bank.hidden_size, generator=rng).bfloat16()
            ids = torch.randint(0, 256, (1, tokens), generator=rng)
            named = {"input_ids": ids} if hash_layer else {}
            assert traced(x, **named).equal(block(x, **named))
    assert counter.targets == [["exactmoe.block.default"]] * 4


def test_gradients_of_a_whole_block_are_refused(model, rng):
    _, block, layer = blocks(copy.deepcopy(model))[-1]
    x = torch.zeros(1, 3, layer.bank.hidden_size, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="the call needs gradients"):
        block(x.clone().requires_grad_())
    block.gate.weight.requires_grad_()
    with pytest.raises(Unsupported, match="the call needs gradients"):
        block(x)
    with torch.no_grad():
        block(x)
