"""Plans: bytes against the published figures and against layers, what fits, what would."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exactmoe import Partition, Placement, load_layer
from exactmoe.checkpoint.model_bytes import of_checkpoint, of_config, packed_bytes
from exactmoe.errors import CheckpointError, ConfigError
from exactmoe.fitting import Setting, _regions, plan_model, workspace_bytes
from exactmoe.ops import DEVICE, PACKED, gpu_storages
from exactmoe.report.plan import floors
from exactmoe.runtime.sizes import parse_bytes, parse_rates
from exactmoe.runtime.workspace import total_bytes
from published_configs import deepseek_v4_flash, glm_5_3_flash

DEMO = Path(__file__).resolve().parents[2] / "demo"
GIB = 2**30


@pytest.fixture
def bare(tmp_path):
    """A config.json without weights."""

    def write(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    return write


def setting(model, cards, **changes):
    free = tuple(round(size * GIB) for size in cards)
    reserve = (8 * GIB,) + (0,) * (len(cards) - 1)
    made = Setting(model, free, rows=4096, kv_reserve=reserve, other_bytes=15 * 10**9)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("config", "format", "gigabytes"),
    [
        (glm_5_3_flash(), None, "171.23"),
        (deepseek_v4_flash(), None, "147.17"),
        (deepseek_v4_flash(), "nvfp4", "155.83"),
    ],
)
def test_routed_experts_of_published_models(bare, config, format, gigabytes):
    model = of_config(bare(config), format=format)
    assert f"{model.routed_bytes / 1e9:.2f}" == gigabytes
    assert model.other_bytes is None


def test_what_configs_say_of_the_format(bare):
    config = deepseek_v4_flash()
    assert of_config(bare(config)).format == "mxfp4"
    config["quantization_config"]["moe_quant_algo"] = "NVFP4"
    assert of_config(bare(config)).format == "nvfp4"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
    }
    assert of_config(bare(config)).format == "nvfp4"
    del config["quantization_config"]
    assert of_config(bare(config)).format == "bf16"
    config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(ConfigError, match="quant_method 'awq'.*--format"):
        of_config(bare(config))
    assert of_config(bare(config), format="mxfp4").format == "mxfp4"


@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v4"])
def test_bytes_are_those_of_loaded_layers(name):
    model = of_checkpoint(DEMO / name)
    bare = of_config(DEMO / name / "config.json")
    assert model.routed_bytes == bare.routed_bytes
    routers = [[layer.router_bytes for layer in m.layers] for m in (model, bare)]
    assert routers[0] == routers[1]
    for layer in (0, 1):
        found, loaded = model.layers[layer], load_layer(DEMO / name, layer)
        if found.spec.moe is None:
            assert found.dense_bytes == loaded.bank.nbytes
            continue
        assert found.num_experts * found.expert_bytes == loaded.bank.nbytes
        assert found.dense_bytes == loaded.shared.bank.nbytes
        assert found.router_bytes == sum(buffer.nbytes for buffer in loaded.router.buffers())


def test_headers_account_for_every_byte():
    """Without MTP, scales of a cache and the like, files hold nothing else."""
    model = of_checkpoint(DEMO / "deepseek_v4")
    files = sum(path.stat().st_size for path in (DEMO / "deepseek_v4").glob("*.safetensors"))
    counted = model.routed_bytes + model.mlp_bytes + model.other_bytes
    assert 0 <= files - counted < 300_000  # the header, and E8M0 scales that become float32


@pytest.mark.parametrize("rows", [1, 17, 4096])
def test_the_workspace_is_what_layers_ask_for(monkeypatch, rows):
    """On a GPU a layer asks for the larger of the two storages there."""
    from exactmoe import block

    monkeypatch.setattr(block, "_storages", lambda device, a8_units: gpu_storages(a8_units))
    for name in ("glm5_next", "deepseek_v4"):
        layers = [load_layer(DEMO / name, layer) for layer in (0, 1)]
        asked = max(layer.workspace_bytes(rows) for layer in layers)
        model = of_checkpoint(DEMO / name)
        one = Partition((0,) * layers[1].config.num_experts)
        assert workspace_bytes(model, rows, one, 0) == asked


@pytest.mark.parametrize("first", [5, 10, 12])
@pytest.mark.parametrize("name", ["glm5_next", "deepseek_v4"])
def test_the_workspaces_of_cards_are_together_that_of_a_layer_over_them(name, first):
    """Cards of one device lie in one arena, so there the sum is seen."""
    model = of_checkpoint(DEMO / name)
    num_experts = model.layers[1].num_experts
    partition = Partition((0,) * first + (1,) * (num_experts - first))
    placement = Placement(["cpu", "cpu"], partition=partition.owners, returns="slots")
    layer = load_layer(DEMO / name, 1, cards=placement)
    only = replace(model, layers=model.layers[1:2])
    for storage in (PACKED, DEVICE):
        asked = total_bytes(layer.regions(64, storage))
        found = [
            total_bytes(_regions(only.layers[0].spec, 64, storage, partition, c, n))
            for c, n in enumerate(partition.counts)
        ]
        assert sum(found) == asked


def test_two_cards_of_96_gib_hold_glm_unevenly(bare):
    model = of_config(bare(glm_5_3_flash()))
    plan = plan_model(setting(model, (96, 96)))
    first, second = plan.cards
    assert plan.partition.counts[0] < plan.partition.counts[1]
    assert sum(plan.partition.counts) == 288
    assert first.experts + second.experts == model.routed_bytes
    assert first.left >= 8 * GIB
    assert second.left >= 0
    assert first.dense == model.mlp_bytes
    assert second.dense == 0
    for card in plan.cards:
        parts = card.experts + card.dense + card.other + card.workspace + card.left
        assert parts == 96 * GIB


def test_what_does_not_fit_and_what_would(bare):
    model = of_config(bare(glm_5_3_flash()))
    asked = setting(model, (80, 80))
    plan = plan_model(asked)
    assert plan.partition is None
    assert plan.missing > 20 * GIB
    assert plan.would_fit[0] == "3 cards, the further ones of 80.00 GiB"
    more = int(plan.would_fit[1].split()[0])
    assert plan.would_fit[1] == f"{more} GiB more on each card"
    assert plan_model(setting(model, (80 + more,) * 2)).partition is not None
    assert plan_model(setting(model, (79 + more,) * 2)).partition is None
    third = replace(asked, free_bytes=(80 * GIB,) * 3, kv_reserve=(8 * GIB, 0, 0))
    assert plan_model(third).partition is not None


def test_a_smaller_reserve_or_fewer_rows_may_be_enough(bare):
    model = of_config(bare(glm_5_3_flash()))
    tight = plan_model(setting(model, (96, 96), kv_reserve=(14 * GIB, 0)))
    reserve = next(line for line in tight.would_fit if line.startswith("a KV reserve of"))
    kept = parse_bytes("", reserve.removeprefix("a KV reserve of ").split(",")[0])
    assert plan_model(setting(model, (96, 96), kv_reserve=(kept, 0))).partition is not None
    rows = next(line for line in tight.would_fit if line.startswith("--rows"))
    assert plan_model(replace(tight.setting, rows=int(rows.split()[1]))).partition is not None


def test_a_first_card_without_room_is_missing_bytes_although_others_have_room(bare):
    model = of_config(bare(deepseek_v4_flash()))
    plan = plan_model(setting(model, (4, 200)))
    assert plan.partition is None
    card, expert = plan.cards[0], sum(layer.expert_bytes for layer in model.layers)
    over = card.dense + card.other + card.workspace + 8 * GIB - 4 * GIB
    assert plan.missing == over + expert
    assert plan.would_fit == (f"{-(-plan.missing // GIB)} GiB more on each card",)


def test_a_card_with_room_for_half_an_expert_misses_the_other_half(bare):
    model = of_config(bare(deepseek_v4_flash()))
    expert = sum(layer.expert_bytes for layer in model.layers)
    plan = plan_model(setting(model, (4, 200)))
    used = 4 * GIB - plan.cards[0].left + 8 * GIB
    half = replace(plan.setting, free_bytes=(used + expert // 2, 200 * GIB))
    assert plan_model(half).missing == expert - expert // 2


def test_floor_of_one_card_is_its_reads(bare):
    model = of_config(bare(glm_5_3_flash()))
    plan = plan_model(setting(model, (200,)))
    one, two = floors(plan, (4.5e12,), (1, 2))
    read = 8 * 42 * (14_155_776 + 12) + model.mlp_bytes
    assert one.distinct == pytest.approx(8)
    assert one.seconds == pytest.approx(read / 4.5e12)
    assert two.distinct == pytest.approx(288 * (1 - (280 / 288) ** 2))
    assert two.seconds > one.seconds


def test_floor_of_two_cards_is_that_of_the_slower(bare):
    plan = plan_model(setting(of_config(bare(deepseek_v4_flash())), (96, 96)))
    (same,) = floors(plan, (1e12,), (4,))
    assert same.seconds == pytest.approx(max(same.card_bytes) / 1e12)
    (slow,) = floors(plan, (1e12, 1e11), (4,))
    assert slow.seconds == pytest.approx(same.card_bytes[1] / 1e11)
    with pytest.raises(ConfigError, match="3 read rates for 2 cards"):
        floors(plan, (1e12,) * 3)


def test_packed_bytes():
    assert packed_bytes("nvfp4", 2048, 4096) == 2048 * 4096 // 2 + 2048 * 4096 // 16 + 4
    assert packed_bytes("mxfp4", 2048, 4096) == 2048 * 4096 // 2 + 2048 * 4096 // 32
    assert packed_bytes("fp8", 130, 128) == 130 * 128 + 2 * 4
    assert packed_bytes("bf16", 3, 16) == 96
    with pytest.raises(ConfigError, match="format is 'int4'; allowed: nvfp4, mxfp4, bf16, fp8"):
        packed_bytes("int4", 1, 16)


def test_sizes_as_people_write_them():
    assert parse_bytes("x", "96GiB") == 96 * GIB
    assert parse_bytes("x", " 1.5 GB ") == 1_500_000_000
    assert parse_bytes("x", "7") == 7
    assert parse_rates("x", "4.5TB/s, 273GB/s") == (4.5e12, 2.73e11)
    for bad in ("", "GiB", "-1GiB", "96 gigs", "1e3"):
        with pytest.raises(ConfigError, match="x is .*; allowed: bytes such as 96GiB"):
            parse_bytes("x", bad)
    for bad in ("4.5TB", "0TB/s", "4TB/m"):
        with pytest.raises(ConfigError, match="x is .*; allowed: rates"):
            parse_rates("x", bad)


def test_a_config_that_cannot_be_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds a list"):
        of_config(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        of_config(tmp_path / "none.json")


def test_no_more_cards_than_experts_are_proposed():
    model = of_checkpoint(DEMO / "glm5_next")
    model = replace(model, layers=tuple(_few(layer) for layer in model.layers))
    plan = plan_model(setting(model, (0.001, 0.001), kv_reserve=(0, 0), other_bytes=0))
    assert plan.partition is None
    assert not any(line.endswith("MiB") and "cards" in line for line in plan.would_fit)


def _few(layer):
    """The layer with three experts."""
    if layer.spec.moe is None:
        return layer
    moe = replace(layer.spec.moe, num_experts=3, top_k=2)
    return replace(layer, spec=replace(layer.spec, moe=moe))
