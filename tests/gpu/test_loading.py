"""A streamed load to a card: the file's bytes, in the memory that stays, and nothing beside it."""

import pytest
import torch

from exactmoe.checkpoint import Checkpoint, Reader, Share, plan_layer, read_layer
from exactmoe.config import Placement
from exactmoe.errors import Unsupported
from exactmoe.load import load_layer, make_layer
from synthetic_checkpoints import Synthetic, write_synthetic

CARD = torch.device("cuda", 0)
# Projections of 18 MiB: three pieces of a lane for some tensors, less than one for others.
WIDE = {"hidden_size": 4096, "intermediate_size": 2048, "num_experts": 4}

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dialect", ["modelopt", "stacked-nvfp4", "deepseek", "bf16"])
def test_a_card_holds_the_bytes_of_the_files(tmp_path, dialect):
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(dialect=dialect, **WIDE)))
    expected = read_layer(checkpoint, 1)
    found = read_layer(checkpoint, 1, shares=[Share(CARD)])
    buffers = dict(found.bank.named_buffers())
    for name, buffer in expected.bank.named_buffers():
        assert buffers[name].device == CARD
        assert buffers[name].cpu().view(torch.uint8).equal(buffer.view(torch.uint8)), name


def test_what_a_card_takes_beside_the_weights(tmp_path):
    """At most one projection, the order of the kernels included."""
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(num_layers=3, **WIDE)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CARD)
    before = torch.cuda.memory_allocated(CARD)
    weights = [read_layer(checkpoint, number, shares=[Share(CARD)]) for number in (1, 2)]
    resident = torch.cuda.memory_allocated(CARD) - before
    projection = weights[0].bank.gate.nbytes
    assert torch.cuda.max_memory_allocated(CARD) - before - resident <= projection
    payload = sum(w.bank.nbytes + w.shared.nbytes for w in weights)
    assert resident <= 1.01 * payload + (2 << 20)


def test_layers_of_a_card_have_the_bits_of_a_loaded_one(tmp_path):
    path = write_synthetic(tmp_path, Synthetic(**WIDE))
    weights = read_layer(Checkpoint(path), 1, shares=[Share(CARD)])
    layer = make_layer(weights, Placement((str(CARD),)))
    x = torch.randn(9, 4096, device=CARD).bfloat16()
    assert layer(x).equal(load_layer(path, 1, cards=[str(CARD)])(x))
    canonical = read_layer(Checkpoint(path), 1).bank
    assert layer.bank.gate.codes.cpu().equal(canonical.gate.codes)


def test_memory_that_was_in_use_is_not_overwritten_early(tmp_path):
    """A lane's stream waits for what the current stream still does with the memory."""
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(**WIDE)))
    expected = read_layer(checkpoint, 1).bank.gate_codes
    for _ in range(5):
        busy = torch.zeros_like(expected, device=CARD)
        torch.cuda._sleep(50_000_000)
        busy.fill_(0xAA)
        del busy  # its memory is given to the next tensor while it is still to be filled
        with Reader(checkpoint) as reader:
            weight = reader.weight(plan_layer(checkpoint, 1).experts["gate"], device=CARD)
        torch.cuda.synchronize()
        assert weight.codes.cpu().equal(expected)


def test_a_card_without_room_is_named(tmp_path):
    checkpoint = Checkpoint(write_synthetic(tmp_path, Synthetic(**WIDE)))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4, CARD)
    try:
        with pytest.raises(Unsupported, match=r"card cuda:0 has no room for .*: .*MiB are asked"):
            read_layer(checkpoint, 1, shares=[Share(CARD)])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CARD)
    assert read_layer(checkpoint, 1, shares=[Share(CARD)])
