"""A bank whose bytes are in the order of a kernel: whoever else reads it gets canonical bytes."""

import copy
import pickle

import pytest
import torch

from arranged_paths import LAYOUTS, arranged_backend
from exactmoe import ExpertBank, MoELayer, ops
from exactmoe.errors import ConfigError, Unsupported
from layers import assert_same_bits, layer_of, random_bank, random_call

NAMES = [f"{p}_{part}" for p in ("gate", "up", "down") for part in ("codes", "scales")]


@pytest.fixture(params=LAYOUTS)
def backend(request, monkeypatch):
    with arranged_backend(monkeypatch, request.param):
        yield


@pytest.fixture(params=["nvfp4", "mxfp4"])
def bank(request, rng) -> ExpertBank:
    return random_bank(rng, request.param, 3, 256, 128)


def bytes_of(bank: ExpertBank) -> dict[str, torch.Tensor]:
    return {name: bank.get_buffer(name).clone() for name in NAMES}


def assert_bytes(found, expected) -> None:
    for name in NAMES:
        assert_same_bits(found[name], expected[name], name)


def arranged(bank: ExpertBank) -> MoELayer:
    """A layer over the bank, in whose order the bytes are after its first call."""
    layer = layer_of(bank, 2, "cuda")
    layer.experts(*random_call(torch.Generator().manual_seed(0), layer, 2))
    assert bank.layout == "fragment"
    return layer


def test_a_call_arranges_and_gives_the_same_bits(backend, bank, rng):
    call = random_call(rng, layer_of(bank, 2, "cpu"), 9)
    expected, before = layer_of(bank, 2, "cpu").experts(*call), bytes_of(bank)
    addresses = [buffer.data_ptr() for buffer in bank.buffers()]
    layer = arranged(bank)
    assert_same_bits(layer.experts(*call), expected)
    assert [buffer.data_ptr() for buffer in bank.buffers()] == addresses
    assert not torch.equal(bank.gate_codes, before["gate_codes"])
    bank.arrange("canonical")
    assert_bytes(bytes_of(bank), before)
    assert_same_bits(layer.experts(*call), expected)
    assert bank.layout == "fragment"


def test_what_leaves_the_bank_is_canonical(backend, bank, tmp_path):
    before = bytes_of(bank)
    layer = arranged(bank)
    assert_bytes(bank.state_dict(), before)
    torch.save(layer, tmp_path / "layer.pt")
    for other in (
        copy.deepcopy(bank),
        pickle.loads(pickle.dumps(bank)),
        copy.deepcopy(layer).bank,
        torch.load(tmp_path / "layer.pt", weights_only=False).bank,
    ):
        assert other.layout == "canonical"
        assert_bytes(bytes_of(other), before)
    for projection in ("gate", "up", "down"):
        weight = getattr(bank, projection)
        assert_same_bits(weight.codes, before[f"{projection}_codes"])
        assert_same_bits(weight.scales, before[f"{projection}_scales"])
    assert bank.layout == "fragment"
    assert layer.explain(3).fp8_experts == copy.deepcopy(layer).explain(3).fp8_experts
    assert "layout=fragment" in repr(bank)


def test_moving_and_loading_go_through_canonical_order(backend, bank, rng):
    before = bytes_of(bank)
    layer = arranged(bank)
    call = random_call(rng, layer, 5)
    expected = layer.experts(*call)
    layer.to("cpu")
    assert bank.layout == "canonical"
    assert_bytes(bytes_of(bank), before)
    assert_same_bits(layer.experts(*call), expected)
    state = copy.deepcopy(bank).state_dict()
    bank.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    assert_bytes(bytes_of(bank), before)
    assert_same_bits(layer.experts(*call), expected)
    layer.refresh()
    assert_bytes(bytes_of(bank), before)


def test_arranging_is_no_write(backend, bank):
    versions = [buffer._version for buffer in bank.buffers()]
    arranged(bank)
    bank.arrange("canonical")
    assert [buffer._version for buffer in bank.buffers()] == versions


@pytest.mark.parametrize("name", ["gate_codes", "up_scales", "down_codes"])
def test_a_write_in_another_order_is_refused_until_the_bytes_are_loaded(name, backend, bank, rng):
    layer = arranged(bank)
    call, good = random_call(rng, layer, 3), bank.state_dict()
    expected = layer.experts(*call)
    bank.get_buffer(name)[0, 0, 0] = 3
    for read in (lambda: layer.experts(*call), bank.state_dict, lambda: bank.arrange("canonical")):
        with pytest.raises(ConfigError, match=f"^{name} changed while .* in fragment order"):
            read()
    setattr(bank, name, bank.get_buffer(name).clone())
    with pytest.raises(ConfigError, match=f"^{name} changed while"):
        layer.experts(*call)
    some = {key: tensor for key, tensor in good.items() if key != "down_scales"}
    with pytest.raises(ConfigError, match=f"^{name} changed while"):
        bank.load_state_dict(some, strict=False)
    bank.load_state_dict(good)
    assert_same_bits(layer.experts(*call), expected)
    assert_bytes(bank.state_dict(), good)


def test_a_global_scale_may_be_written(backend, rng):
    bank = random_bank(rng, "nvfp4", 3, 128, 128)
    layer, plain = arranged(bank), layer_of(copy.deepcopy(bank), 2, "cpu")
    call = random_call(rng, layer, 4)
    for changed in (layer, plain):
        changed.bank.up_global_scale.mul_(2)
    assert_same_bits(layer.experts(*call), plain.experts(*call))
    assert bank.layout == "fragment"
    bank.up_global_scale[1] = 0
    with pytest.raises(ConfigError, match="global scale of expert 1 is 0.0"):
        layer.experts(*call)


def test_a_path_of_another_order_is_refused_with_the_way_out(backend, bank, rng):
    layer = arranged(bank)
    call = random_call(rng, layer, 4)
    expected = layer.experts(*call)
    layer.backend = "cpu"
    with pytest.raises(Unsupported, match="'cpu' reads experts in canonical order.*deepcopy"):
        layer.experts(*call)
    assert_same_bits(copy.deepcopy(layer).experts(*call), expected)
    bank.arrange("canonical")
    assert_same_bits(layer.experts(*call), expected)


def test_two_layers_share_the_order(backend, bank, rng):
    first, second = arranged(bank), layer_of(bank, 2, "cuda")
    call = random_call(rng, first, 4)
    assert_same_bits(first.experts(*call), second.experts(*call))


def test_refusals(backend, rng):
    odd = random_bank(rng, "nvfp4", 2, 128, 64)
    with pytest.raises(Unsupported, match="gate has no fragment order: .*64"):
        odd.arrange("fragment")
    with pytest.raises(ConfigError, match="layout is 'rows'; allowed: canonical, fragment"):
        odd.arrange("rows")
    assert odd.layout == "canonical"
    whole = random_bank(rng, "nvfp4", 2, 128, 128)
    fixed = ExpertBank(whole.gate, whole.up, whole.down, fixed_order=True)
    with pytest.raises(Unsupported, match="order of these bytes is fixed"):
        fixed.arrange("fragment")
    with pytest.raises(Unsupported, match="'cuda' cannot run on cpu: it rearranges the experts"):
        layer_of(fixed, 1, "cuda")


def test_a_captured_graph_keeps_the_order(backend, bank, rng, monkeypatch):
    from exactmoe.bank import arranged as module
    from exactmoe.runtime import workspace

    layer = arranged(bank)
    call = random_call(rng, layer, 3)
    monkeypatch.setattr(module, "capturing", lambda device: True)
    layer.experts(*call)
    monkeypatch.setattr(module, "capturing", lambda device: False)
    with pytest.raises(Unsupported, match="captured CUDA graph may read these experts"):
        bank.arrange("canonical")
    assert bank.state_dict().keys() and bank.layout == "fragment"
    workspace.release_captures(bank.device)
    bank.arrange("canonical")


def test_a_captured_call_of_no_tokens_reads_no_experts(backend, bank, rng, monkeypatch):
    layer = arranged(bank)
    monkeypatch.setattr("exactmoe.bank.arranged.capturing", lambda device: True)
    layer.experts(*random_call(rng, layer, 0))
    monkeypatch.setattr("exactmoe.bank.arranged.capturing", lambda device: False)
    bank.arrange("canonical")
    assert bank.layout == "canonical"


def test_canonical_paths_never_arrange(rng):
    bank = random_bank(rng, "nvfp4", 2, 128, 128)
    assert ops.path("cpu").storage.layout == "canonical"
    layer_of(bank, 1, "cpu").experts(*random_call(rng, layer_of(bank, 1, "cpu"), 2))
    assert bank.layout == "canonical" and bank.gate.codes is bank.gate_codes
