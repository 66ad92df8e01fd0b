"""Recording the MLP blocks of a model, and replaying them in chunks."""

import pytest
import torch
from torch import nn

import faulty_layers as faults
from exactmoe.errors import BitMismatch, ConfigError
from exactmoe.proof import recording, replay
from exactmoe.proof.replay import SIZES
from faulty_layers import faulty
from layers import normal
from small_layers import VOCABULARY, small_dense, small_layer

TOKENS = 131


class DenseBlock(nn.Module):
    """A block that our layer runs, called as transformers calls an MLP."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states):
        return self.layer(hidden_states.reshape(-1, hidden_states.shape[-1])).view_as(hidden_states)


class MoEBlock(DenseBlock):
    def forward(self, hidden_states, input_ids=None):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = self.layer(rows, token_ids=None if input_ids is None else input_ids.reshape(-1))
        return y.view_as(hidden_states)


class Model(nn.Module):
    """Dense, score, hash: three blocks of one width, one after the other."""

    def __init__(self, rng):
        super().__init__()
        layers = (small_dense(rng), small_layer(rng), small_layer(rng, "hash", format="mxfp4"))
        kinds = (DenseBlock, MoEBlock, MoEBlock)
        self.blocks = nn.ModuleList(kind(lay) for kind, lay in zip(kinds, layers, strict=True))

    def forward(self, hidden_states, input_ids):
        hidden_states = self.blocks[0](hidden_states)
        hidden_states = self.blocks[1](hidden_states, input_ids=input_ids)
        return self.blocks[2](hidden_states=hidden_states, input_ids=input_ids)

    def found(self):
        return [(index, block, block.layer) for index, block in enumerate(self.blocks)]


def record(rng, model, tokens=TOKENS):
    x = normal(rng, 1, tokens, 64)
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=rng)
    with recording(model.found()) as calls:
        model(x, ids)
    return x, ids, calls


def test_recording(rng):
    model = Model(rng)
    x, ids, calls = record(rng, model)
    assert [(call.index, call.entry.name) for call in calls] == [
        (0, "dense"),
        (1, "block"),
        (2, "block"),
    ]
    assert torch.equal(calls[0].batch.x, x[0])
    assert torch.equal(calls[1].batch.x, calls[0].y)
    assert calls[0].batch.token_ids is None
    assert calls[1].batch.token_ids is None
    assert torch.equal(calls[2].batch.token_ids, ids[0])
    assert torch.equal(calls[2].y, model(x, ids)[0])
    assert len(calls) == 3  # the hooks are gone


def test_hooks_are_gone_after_an_error(rng):
    model = Model(rng)
    with pytest.raises(RuntimeError, match="planted"), recording(model.found()):
        raise RuntimeError("planted")
    assert not any(block._forward_hooks for block in model.blocks)


def test_replay_in_chunks(rng):
    _, _, calls = record(rng, Model(rng))
    said = []
    report = replay(calls, progress=said.append)
    report.raise_on_mismatch()
    assert list(report.dimensions) == ["whole prompt"] + [f"chunks of {size}" for size in SIZES]
    assert {count.comparisons for count in report.dimensions.values()} == {3 * TOKENS}
    assert report.nbytes == 7 * 3 * TOKENS * 64 * 2
    assert said == [f"replay of {TOKENS} tokens, 3 blocks: layer {layer}" for layer in range(3)]


def test_a_width_that_changes_bits_is_named(rng):
    model = Model(rng)
    faulty(model.blocks[1].layer, faults.Width)
    _, _, calls = record(rng, model)
    report = replay(calls)
    names = [difference.dimension for difference in report.differences]
    assert names == ["chunks of 1", "chunks of 2", "chunks of 3", "chunks of 5", "chunks of 8"] + [
        "chunks of 64"  # its last chunk has three tokens
    ]
    first = report.differences[0]
    assert (first.case, first.width, first.token) == ("layer 1, chunk from token 0", 1, 0)
    last = report.differences[-1]
    assert (last.case, last.width) == ("layer 1, chunk from token 128", 3)
    with pytest.raises(BitMismatch, match="chunks of 1 .layer 1, chunk from token 0"):
        report.raise_on_mismatch()


def test_a_model_that_got_something_else_is_named(rng):
    model = Model(rng)
    right = model.blocks[0].forward
    model.blocks[0].forward = lambda hidden: right(hidden) + 1
    _, _, calls = record(rng, model)
    report = replay(calls)
    assert report.differences[0].dimension == "whole prompt"
    assert report.differences[0].case == "layer 0"


@pytest.mark.parametrize("sizes", [(), (0, 2)])
def test_refused(rng, sizes):
    _, _, calls = record(rng, Model(rng), tokens=3)
    with pytest.raises(ConfigError, match="sizes from 1"):
        replay(calls, sizes)
    with pytest.raises(ConfigError, match="0 recorded calls"):
        replay([])
