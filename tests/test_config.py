"""Configs are frozen, complete, and checked when they are made (field fault A7 for the limits)."""

import json
import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from exactmoe.config import (
    Limits,
    MoEConfig,
    Numerics,
    Placement,
    RouterConfig,
    checked_swiglu_limit,
)
from exactmoe.errors import ConfigError, Unsupported

GEOMETRY = {"hidden_size": 4096, "intermediate_size": 2048, "num_experts": 256, "top_k": 6}
A8 = Numerics(activation="a8", units="auto", slot="f32", output="bf16", router="f32")
# One legal instance of each class with no field at its default.
EXAMPLES = [
    Numerics(activation="a8", units="fp8", slot="f32", output="f32", router="bf16_ladder"),
    RouterConfig(score="sqrt_softplus", factor=2.5, normalize=False),
    MoEConfig(**GEOMETRY, swiglu_limit=10.0, numerics="a8"),
    Placement(cards=("cpu", "cpu")),
    Limits(max_rows=64, checks=True),
]
BY_NAME = pytest.mark.parametrize("config", EXAMPLES, ids=lambda c: type(c).__name__)


@BY_NAME
def test_round_trip_through_a_dict_and_json(config):
    kind = type(config)
    assert kind.from_dict(config.to_dict()) == config
    assert kind.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert list(config.to_dict()) == [f.name for f in fields(config)]


@BY_NAME
def test_unknown_keys_raise_and_the_known_ones_are_named(config):
    kind = type(config)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} has no field \['n_group'\]") as caught:
        kind.from_dict({**config.to_dict(), "n_group": 1})
    assert all(f.name in str(caught.value) for f in fields(config))
    with pytest.raises(TypeError, match="n_group"):
        kind(**config.to_dict(), n_group=1)


@BY_NAME
def test_frozen_and_hashable(config):
    for field in fields(config):
        with pytest.raises(FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert hash(config) == hash(replace(config))


def test_from_dict_names_missing_fields_and_takes_mappings_only():
    with pytest.raises(ConfigError, match=r"MoEConfig misses \['num_experts', 'top_k'\]"):
        MoEConfig.from_dict({"hidden_size": 64, "intermediate_size": 64})
    with pytest.raises(ConfigError, match=r"RouterConfig misses \['score'\]"):
        RouterConfig.from_dict({})
    with pytest.raises(ConfigError, match="Limits from 512; allowed: a mapping"):
        Limits.from_dict(512)
    with pytest.raises(ConfigError, match=r"no field \[1, 'b'\]"):
        Limits.from_dict({1: 2, "b": 3})
    assert Limits.from_dict({}) == Limits(max_rows=None, checks=False)


def test_tokens_a_piece_are_the_device_s_unless_named():
    cpu, card = torch.device("cpu"), torch.device("cuda", 1)
    assert (Limits().rows_on(cpu), Limits(checks=True).rows_on(card)) == (512, 4096)
    for device in (cpu, card):
        assert Limits(max_rows=512).rows_on(device) == 512
        assert Limits(max_rows=9).rows_on(device) == 9


BAD_FIELDS = [
    (Numerics, {}, "activation", "a4", "numerics.activation", "a16, a8"),
    (Numerics, {}, "activation", None, "numerics.activation", "a16, a8"),
    (Numerics, {}, "units", "fp4", "numerics.units", "auto, bf16, fp8"),
    (Numerics, {}, "units", "auto", "numerics.units with activation a16", "bf16"),
    (Numerics, {}, "units", "fp8", "numerics.units with activation a16", "bf16"),
    (Numerics, {}, "slot", "f16", "numerics.slot", "bf16, f32"),
    (Numerics, {"activation": "a8"}, "slot", "bf16", "numerics.slot with activation a8", "f32"),
    (Numerics, {}, "output", "f64", "numerics.output", "bf16, f32"),
    (Numerics, {}, "router", "bf16", "numerics.router", "f32, bf16_ladder"),
    (RouterConfig, {}, "score", "softmax", "score", "sigmoid, sqrt_softplus"),
    (RouterConfig, {"score": "sigmoid"}, "normalize", 1, "normalize", "True, False"),
    *(
        (RouterConfig, {"score": "sigmoid"}, "factor", bad, "factor", "a finite float32 > 0")
        for bad in (0, 0.0, -2.5, math.nan, math.inf, "2.5", None, True, 10**400, 1e39, 1e-46)
    ),
    *((MoEConfig, GEOMETRY, n, 0, n, "an integer from 1") for n in GEOMETRY),
    *((MoEConfig, GEOMETRY, n, -1, n, "an integer from 1") for n in GEOMETRY),
    *((MoEConfig, GEOMETRY, n, 64.0, n, "an integer from 1") for n in GEOMETRY),
    *((MoEConfig, GEOMETRY, n, True, n, "an integer from 1") for n in GEOMETRY),
    *((MoEConfig, GEOMETRY, n, None, n, "an integer from 1") for n in GEOMETRY),
    (MoEConfig, GEOMETRY, "num_experts", 1025, "num_experts", "from 1 to 1024"),
    (MoEConfig, GEOMETRY, "top_k", 65, "top_k", "from 1 to 64"),
    (MoEConfig, GEOMETRY, "swiglu_limit", -1.0, "swiglu_limit", "a finite float32 > 0"),
    (MoEConfig, GEOMETRY, "numerics", "a4", "numerics", "a16, a8, or a Numerics"),
    (MoEConfig, GEOMETRY, "numerics", None, "numerics", "a16, a8, or a Numerics"),
    *(
        (Placement, {}, "cards", bad, "cards", "a non-empty sequence of device names")
        for bad in ("cpu", (), [], None, 2, ("cpu", 0), ("",), {"cpu"}, b"cpu")
    ),
    *(
        (
            Placement,
            {},
            "partition",
            bad,
            "partition",
            "even, fit, or the card's number of each expert",
        )
        for bad in ("odd", (), 3, {0})
    ),
    (Placement, {}, "partition", (0, 1), "owner of expert 1", "an integer from 0 to 0"),
    (Placement, {}, "returns", "sums", "returns", "auto, slots, partials"),
    (Placement, {}, "serial", 1, "serial", "True, False"),
    *((Limits, {}, "max_rows", bad, "max_rows", "an integer from 1") for bad in (0, 1.5, "9")),
    *((Limits, {}, "checks", bad, "checks", "True, False") for bad in (1, "no", None)),
]


@pytest.mark.parametrize(("kind", "others", "field", "value", "name", "allowed"), BAD_FIELDS)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(
    kind, others, field, value, name, allowed
):
    with pytest.raises(ConfigError) as caught:
        kind(**{**others, field: value})
    shown = value[1] if name.startswith("owner") else value
    assert str(caught.value).startswith(f"{name} is {shown!r}; allowed: ")
    assert allowed in str(caught.value)


@pytest.mark.parametrize("value", [None, 0, 0.0, -0.0])
def test_no_swiglu_limit(value):
    assert checked_swiglu_limit(value) is None
    assert MoEConfig(**GEOMETRY, swiglu_limit=value).swiglu_limit is None


@pytest.mark.parametrize("value", [10, 7.0, 1e-45, 3.4e38])
def test_a_swiglu_limit_is_kept_as_a_float(value):
    limit = MoEConfig(**GEOMETRY, swiglu_limit=value).swiglu_limit
    assert (limit, type(limit)) == (value, float)


@pytest.mark.parametrize(
    "value", [-1, -1e-9, math.nan, math.inf, -math.inf, True, False, "10", 10**400, 1e39, 1e-46]
)
def test_other_swiglu_limits_raise(value):
    for call in (checked_swiglu_limit, lambda v: MoEConfig(**GEOMETRY, swiglu_limit=v)):
        with pytest.raises(ConfigError, match="swiglu_limit is ") as caught:
            call(value)
        assert repr(value) in str(caught.value)
        assert "None or 0 (no clamp)" in str(caught.value)


def test_numerics_presets():
    assert Numerics.preset("a16") == Numerics("a16", "bf16", "bf16", "bf16", "f32") == Numerics()
    assert Numerics.preset("a8") == A8
    assert Numerics.of(A8) is A8
    assert Numerics.of("a8") == A8
    for bad in ("A16", "a4", "", None, 8):
        with pytest.raises(ConfigError, match="^numerics is .*allowed: a16, a8, or a Numerics"):
            Numerics.of(bad)


@pytest.mark.parametrize("numerics", ["a8", A8, A8.to_dict()])
def test_a_layer_config_holds_full_numerics(numerics):
    config = MoEConfig(**GEOMETRY, numerics=numerics)
    assert config.numerics == A8
    assert config == MoEConfig(**GEOMETRY).with_numerics(numerics)
    assert MoEConfig(**GEOMETRY).numerics == Numerics()
    assert config.with_numerics("a16") == MoEConfig(**GEOMETRY)


def test_unknown_keys_inside_numerics_raise():
    with pytest.raises(ConfigError, match=r"Numerics has no field \['tile'\]"):
        MoEConfig.from_dict({**GEOMETRY, "numerics": {"activation": "a16", "tile": 64}})


def test_the_largest_sizes_are_allowed():
    config = MoEConfig(1, 1, num_experts=1024, top_k=64)
    assert (config.num_experts, config.top_k) == (1024, 64)


def test_cards_become_a_tuple():
    cards = ["cpu", "cpu"]
    placement = Placement(cards)
    cards.append("meta")
    assert placement.cards == ("cpu", "cpu")
    assert Placement().cards == ("cpu",)


@pytest.mark.parametrize("name", ["gpu", "CPU", " cpu", "cuda:-1", "cpu:", "0"])
def test_a_card_that_is_no_device_name(name):
    with pytest.raises(ConfigError, match="allowed: a device name such as cpu or cuda:0") as caught:
        Placement(("cpu", name))
    assert str(caught.value).startswith(f"card is {name!r}; ")


@pytest.mark.parametrize("name", ["mps", "meta", "xpu:0"])
def test_a_card_that_nothing_here_runs_on(name):
    with pytest.raises(Unsupported, match=f"card is '{name}'; this version runs on: cpu, cuda"):
        Placement(("cpu", name))
