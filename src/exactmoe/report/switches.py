"""The environment switches as a table: what `exactmoe env` prints and docs/env.md holds."""

from typing import Any

from exactmoe import env

_HEAD = """\
# Environment switches

`exactmoe env` prints this table with the values of the process. A switch is read when it is used;
a value that is not allowed is an error that names the switch. This page is written by
`exactmoe env --markdown > docs/env.md`.

| switch | default | allowed | meaning |
|---|---|---|---|
"""


def rows() -> list[dict[str, Any]]:
    """name, value, default, allowed and meaning of each switch, as plain values.

    Raises:
        ConfigError: a switch is set to a value that is not allowed.
    """
    return [
        {
            "name": switch.name,
            "value": env.plain(env.read(switch.name)),
            "default": env.plain(switch.default),
            "allowed": switch.allowed,
            "meaning": switch.meaning,
        }
        for switch in env.SWITCHES.values()
    ]


def markdown() -> str:
    """docs/env.md."""
    lines = [
        f"| `{switch.name}` | {_default(switch)} | {switch.allowed} | {switch.meaning} |\n"
        for switch in env.SWITCHES.values()
    ]
    return _HEAD + "".join(lines)


def _default(switch: env.Switch) -> str:
    return "unset" if switch.default is None else str(env.plain(switch.default))
