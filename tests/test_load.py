"""load_layer: the layer that runs computes with the checkpoint's values."""

from pathlib import Path

import pytest
import torch

from checkpoint_maker import (
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    write,
)
from exactmoe.bank import SplitBank
from exactmoe.checkpoint import Checkpoint, read_moe
from exactmoe.config import Placement
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.layer import DenseMLP, MoELayer
from exactmoe.load import load_layer

MOE = "model.language_model.layers.1.mlp"
# E2M1 codes of the values that the rows of up have, and of 1 and 4.
CODES = {1.0: 2, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}
E4M3_ONE, E4M3_EIGHT = 0x38, 0x50


def test_a6_gate_is_not_up_and_low_nibbles_come_first(tmp_path: Path, rng: torch.Generator) -> None:
    """Field fault A6: gate is 32 in every row and up v(r), so y = 32 v; swapped: 32 silu(v).

    The token is 1 at an even and 0.5 at the odd column beside it, so a swapped nibble shows too.
    """
    tensors = glm_tensors(rng)
    rows = [(1.0, 2.0, 3.0, 4.0, 6.0)[row % 5] for row in range(32)]
    for expert in range(4):
        base = f"{MOE}.experts.{expert}"
        for word in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{base}.{word}.weight"].zero_()
            tensors[f"{base}.{word}.weight_scale"].view(torch.uint8).fill_(E4M3_ONE)
            tensors[f"{base}.{word}.weight_scale_2"] = torch.tensor(1.0)
        # gate: 4 x 8 at column 0; up: v at column 0; down: 1 at column r of row r.
        tensors[f"{base}.gate_proj.weight"][:, 0] = CODES[4.0]
        tensors[f"{base}.gate_proj.weight_scale"].view(torch.uint8).fill_(E4M3_EIGHT)
        tensors[f"{base}.up_proj.weight"][:, 0] = torch.tensor([CODES[v] for v in rows]).byte()
        for row in range(32):
            nibble = CODES[1.0] << (4 * (row % 2))
            tensors[f"{base}.down_proj.weight"][row, row // 2] = nibble
    write(tmp_path, glm_config(swiglu_limit=100.0), tensors)
    layer = load_layer(tmp_path, 1)
    assert isinstance(layer, MoELayer)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1.0, 0.5
    y = layer.experts(x, torch.tensor([[3, -1]]), torch.tensor([[1.0, 0.0]]))
    assert y[0, :32].tolist() == [32 * v for v in rows]
    assert y[0, 32:].tolist() == [0.0] * 32


def test_families_have_their_class(tmp_path: Path, rng: torch.Generator) -> None:
    glm = load_layer(write(tmp_path / "glm", glm_config(), glm_tensors(rng)), 1)
    path = write(tmp_path / "deepseek", deepseek_config(), deepseek_tensors(rng))
    deepseek = load_layer(path, 1)
    assert isinstance(glm, MoELayer) and isinstance(deepseek, MoELayer)
    assert (glm.numerics.activation, deepseek.numerics.activation) == ("a16", "a8")
    assert glm.config.swiglu_limit == 10.0
    assert glm.shared is not None and glm.shared.swiglu_limit == 10.0
    other = load_layer(path, 1, numerics="a16")
    assert isinstance(other, MoELayer) and other.numerics.activation == "a16"


def test_dense_layer_is_silu_gate_times_up(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = glm_tensors(rng)
    layer = load_layer(write(tmp_path, glm_config(), tensors), 0)
    assert isinstance(layer, DenseMLP)
    x = torch.randn(5, 64, generator=rng).bfloat16()
    words = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (
        tensors[f"model.language_model.layers.0.mlp.{word}.weight"].double() for word in words
    )
    g, u = (x.double() @ gate.T).clamp(max=10), (x.double() @ up.T).clamp(-10, 10)
    truth = (torch.nn.functional.silu(g) * u) @ down.T
    assert (layer(x).double() - truth).norm() < 2**-7 * truth.norm()


def test_hash_layer_follows_the_table(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = deepseek_tensors(rng)
    path = write(tmp_path, deepseek_config(), tensors)
    layer = load_layer(path, 0)
    assert isinstance(layer, MoELayer) and layer.router is not None
    assert torch.equal(layer.router.table, tensors["layers.0.ffn.gate.tid2eid"])  # type: ignore[arg-type]
    token_ids = torch.tensor([7, 0, 7])
    x = torch.randn(1, 128, generator=rng).bfloat16().expand(3, -1)
    y = layer(x, token_ids=token_ids)
    assert torch.equal(y[0], y[2]) and not torch.equal(y[0], y[1])
    alone = read_moe(Checkpoint(path), 0)
    assert torch.equal(alone.bank.gate.codes, layer.bank.gate.codes)


def test_several_cards(tmp_path: Path, rng: torch.Generator) -> None:
    path = write(tmp_path, deepseek_config(), deepseek_tensors(rng))
    x = torch.randn(6, 128, generator=rng).bfloat16()
    one = load_layer(path, 1)
    placement = Placement(("cpu", "cpu"), (0, 1, 1, 0), "slots")
    for cards in (["cpu", "cpu"], placement):
        layer = load_layer(path, 1, cards=cards)
        assert isinstance(layer, MoELayer) and isinstance(layer.bank, SplitBank)
        assert layer.placement.cards == ("cpu", "cpu")
        assert torch.equal(layer(x).view(torch.int16), one(x).view(torch.int16))
    assert layer.placement == placement
    assert layer.bank.partition.experts == ((0, 3), (1, 2))
    glm = write(tmp_path / "glm", glm_config(), glm_tensors(rng))
    dense = load_layer(glm, 0, cards=["cpu", "cpu"])  # it lives on the first
    assert isinstance(dense, DenseMLP)
    with pytest.raises(ConfigError, match="num_cards is 5 for 4 experts"):
        load_layer(glm, 1, cards=["cpu"] * 5)


def test_refusals(tmp_path: Path, rng: torch.Generator) -> None:
    path = write(tmp_path, glm_config(), glm_tensors(rng))
    with pytest.raises(ConfigError, match="layer is 9; allowed: 0 to 2"):
        load_layer(path, 9)
    for layer in ("2", 1.0, True, None):
        with pytest.raises(ConfigError, match=rf"layer is {layer!r}; allowed: an integer"):
            load_layer(path, layer)
    with pytest.raises(ConfigError, match="cards is 'cpu'"):
        load_layer(path, 1, cards="cpu")
    for layer in (0, 1):  # dense, MoE
        with pytest.raises(Unsupported, match="card is 'cuda:0'; torch .* sees no GPU"):
            load_layer(path, layer, cards=["cuda:0"])
        with pytest.raises(ConfigError, match="card is 'gpu'; allowed: a device name"):
            load_layer(path, layer, cards=["gpu"])
    with pytest.raises(ConfigError, match="numerics"):
        load_layer(path, 1, numerics="a4")
    with pytest.raises(CheckpointError, match="nowhere is not a folder; allowed: a checkpoint"):
        load_layer(tmp_path / "nowhere", 1)
    with pytest.raises(Unsupported, match="class a8 needs multiples of 128"):
        load_layer(path, 1, numerics="a8")
