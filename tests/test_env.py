"""Environment switches: defaults, parsing, and refusals that name switch and allowed values."""

import pytest

from exactmoe import env
from exactmoe.errors import ConfigError


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in env.SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", env.SWITCHES)
def test_unset_and_empty_mean_the_default(name, monkeypatch):
    assert env.read(name) == env.SWITCHES[name].default
    monkeypatch.setenv(name, "")
    assert env.read(name) == env.SWITCHES[name].default
    assert env.changed() == {}


@pytest.mark.parametrize("name", env.SWITCHES)
def test_the_table_is_complete(name):
    switch = env.SWITCHES[name]
    assert switch.name == name
    assert name.startswith("EXACTMOE_") or name == "TRITON_INTERPRET"
    assert switch.allowed
    assert switch.meaning.endswith(".")


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("EXACTMOE_BACKEND", "CPU", "auto, cuda, triton, cpu, reference"),
        ("EXACTMOE_BACKEND", "cuda ", "auto, cuda, triton, cpu, reference"),
        ("EXACTMOE_SHARED_STREAM", "1", "on, off"),
        ("EXACTMOE_UNION", "Off", "on, off"),
        ("EXACTMOE_HOST_LOOP", "true", "on, off"),
        ("EXACTMOE_TILE", "0", "a positive integer"),
        ("EXACTMOE_THREADS", "0", "a positive integer"),
        ("EXACTMOE_THREADS", "-2", "a positive integer"),
        ("EXACTMOE_THREADS", "2.0", "a positive integer"),
        ("EXACTMOE_THREADS", "many", "a positive integer"),
    ],
)
def test_a_bad_value_raises_naming_switch_value_and_allowed(name, text, allowed, monkeypatch):
    monkeypatch.setenv(name, text)
    for call in (lambda: env.read(name), env.changed):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == f"{name}={text!r}; allowed: {allowed}"


def test_values_are_parsed_when_used(monkeypatch):
    monkeypatch.setenv("EXACTMOE_THREADS", "3")
    assert env.read("EXACTMOE_THREADS") == 3
    assert env.changed() == {"EXACTMOE_THREADS": 3}
    monkeypatch.setenv("EXACTMOE_THREADS", "5")
    monkeypatch.setenv("EXACTMOE_BACKEND", "reference")
    assert env.changed() == {"EXACTMOE_BACKEND": "reference", "EXACTMOE_THREADS": 5}


def test_a_switch_set_to_its_default_is_not_changed(monkeypatch):
    monkeypatch.setenv("EXACTMOE_BACKEND", "auto")
    assert env.read("EXACTMOE_BACKEND") == "auto"
    assert env.changed() == {}


def test_an_unknown_switch_is_a_mistake_in_the_code():
    with pytest.raises(KeyError, match="EXACTMOE_NOTHING"):
        env.read("EXACTMOE_NOTHING")
