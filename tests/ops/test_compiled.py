"""torch.compile(fullgraph=True): a layer is one operation, with the bits of an eager call."""

import copy
import gc
import pickle

import pytest
import torch
from packaging.version import Version

from exactmoe import DenseLinear, PackedWeight
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.ops import compiled
from layers import assert_same_bits, normal, random_call
from small_layers import VOCABULARY, small_dense, small_layer

KINDS = [("score", "a16"), ("hash", "a8")]
pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="an older torch is refused under compile"
)


class Counter:
    """A backend that runs the traced graph as it is and counts the traces."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph, inputs):
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        self.targets.append([str(node.target) for node in calls])
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def call(rng, layer, tokens):
    x = normal(rng, tokens, layer.config.hidden_size)
    ids = torch.randint(VOCABULARY, (tokens,), generator=rng)
    return (x,) if layer.router.table is None else (x, ids)


@pytest.mark.parametrize(("kind", "numerics"), KINDS)
def test_one_operation_for_all_widths(rng, kind, numerics):
    layer, counter = small_layer(rng, kind, numerics), Counter()
    traced = compile(layer, counter)
    for tokens in (7, 2, 33, 600):  # 600 rows are two pieces
        given = call(rng, layer, tokens)
        assert_same_bits(traced(*given), layer(*given), str(tokens))
    assert counter.targets == [["exactmoe.block.default"]]
    # torch.compile always traces sizes of 1 anew.
    given = call(rng, layer, 1)
    assert_same_bits(traced(*given), layer(*given))
    assert len(counter.targets) == 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bits_of_the_whole_block(rng, backend):
    layer = small_layer(rng)
    around = compile(lambda x: layer(x * 2) + 1, backend)
    for tokens in (5, 40):
        x = normal(rng, tokens, 64)
        assert_same_bits(around(x), layer(x * 2) + 1)


def test_experts_and_dense_mlp(rng):
    layer, dense, counter = small_layer(rng, "bare"), small_dense(rng), Counter()
    experts = compile(lambda x, ids, weights: layer.experts(x, ids, weights), counter)
    for tokens in (4, 19):
        given = random_call(rng, layer, tokens)
        assert_same_bits(experts(*given), layer.experts(*given))
    traced = compile(dense, counter)
    x = normal(rng, 9, 64)
    assert_same_bits(traced(x), dense(x))
    assert counter.targets == [["exactmoe.experts.default"], ["exactmoe.block.default"]]


def test_both_entries_of_one_layer(rng):
    layer = small_layer(rng)
    x = normal(rng, 6, 64)
    both = compile(lambda x, ids, weights: (layer(x), layer.experts(x, ids, weights)))
    routed = layer.route(x)
    whole, experts = both(x, *routed)
    assert_same_bits(whole, layer(x))
    assert_same_bits(experts, layer.experts(x, *routed))


def test_each_layer_keeps_its_own_weights(rng):
    """Code traced for one layer must not answer for another, or for a copy."""
    run = compile(lambda layer, x: layer(x))
    first, second = small_layer(rng), small_layer(rng)
    x = normal(rng, 8, 64)
    run(first, x)
    copied, unpickled = copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    for duplicate in (copied, unpickled):
        duplicate.bank.down_codes.bitwise_xor_(0x88)
    for layer in (first, second, copied, unpickled, first):
        assert_same_bits(run(layer, x), layer(x))
    assert not copied(x).equal(first(x))
    numbers = {layer._compiled_block.number for layer in (first, second, copied, unpickled)}
    assert len(numbers) == 4
    assert copy.deepcopy(first)._compiled_block.number not in numbers


def test_weights_are_read_when_it_runs(rng):
    layer = small_layer(rng)
    traced, x = compile(layer), normal(rng, 5, 64)
    before = traced(x)
    layer.bank.down_codes.bitwise_xor_(0x88)
    assert not traced(x).equal(before)
    assert_same_bits(traced(x), layer(x))
    layer.load_state_dict(small_layer(rng).state_dict())
    assert_same_bits(traced(x), layer(x))


def test_gradients_are_refused(rng):
    layer = small_layer(rng)
    traced = compile(layer)
    x = normal(rng, 5, 64).requires_grad_()
    with pytest.raises(Exception, match=r"the call needs gradients; .* torch\.no_grad"):
        traced(x)
    with torch.no_grad():
        assert_same_bits(traced(x), layer(x))
    experts = compile(lambda x, ids, weights: layer.experts(x, ids, weights))
    ids, weights = layer.route(x.detach())
    with pytest.raises(Exception, match="the call needs gradients"):
        experts(x.detach(), ids, weights.requires_grad_())


def test_out_is_refused(rng):
    layer = small_layer(rng)
    x = normal(rng, 5, 64)
    for module in (layer, layer.shared):
        with pytest.raises(Exception, match=r"out was given under torch.compile; allowed: None"):
            compile(module)(x, out=torch.empty_like(x))


def test_the_door_is_checked_when_it_runs(rng):
    layer = small_layer(rng)
    traced = compile(layer)
    with pytest.raises(Unsupported, match=r"x is torch.float32; allowed: torch.bfloat16"):
        traced(torch.zeros(3, 64))
    with pytest.raises(ConfigError, match=r"x has shape \(3, 32\); allowed: \[T, 64\]"):
        traced(torch.zeros(3, 32).bfloat16())


def test_a_layer_that_is_gone_is_named(rng):
    layer, x = small_layer(rng), normal(rng, 4, 64)
    compile(layer)(x)
    number = layer._compiled_block.number
    assert torch.ops.exactmoe.block(x, None, number, torch.bfloat16, 64).equal(layer(x))
    del layer
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(Unsupported, match=rf"layer {number}, which is gone"):
        torch.ops.exactmoe.block(x, None, number, torch.bfloat16, 64)


def test_the_operations_keep_their_word(rng):
    """torch's own checks: schema, fake result, no alias, tracing."""
    layer = small_layer(rng)
    x = normal(rng, 4, 64)
    compile(layer)(x)
    routed = layer.route(x)
    compile(lambda *given: layer.experts(*given))(x, *routed)
    handles = layer._compiled_block, layer._compiled_experts
    given = (x, None, handles[0].number, torch.bfloat16, 64)
    torch.library.opcheck(compiled._block, given)
    torch.library.opcheck(compiled._experts, (x, *routed, handles[1].number, torch.bfloat16))


def test_a_linear_layer_of_another_width_keeps_its_word(rng):
    """48 columns out of 64: what is traced has the shape of what comes."""
    layer = DenseLinear(PackedWeight("bf16", normal(rng, 1, 48, 64)))
    x = normal(rng, 4, 64)
    assert_same_bits(compile(layer)(x), layer(x))
    given = (x, None, layer._compiled_block.number, torch.bfloat16, 48)
    torch.library.opcheck(compiled._block, given)


def test_an_older_torch_is_refused(rng, monkeypatch):
    layer = small_layer(rng)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    # The tracer wraps what is raised while it runs; the message stays.
    tracing = torch._dynamo.exc.InternalTorchDynamoError
    with pytest.raises(tracing, match=r"torch is 2\.12\.1\+cu130; allowed .*: 2\.13"):
        compile(layer)(normal(rng, 4, layer.config.hidden_size))
