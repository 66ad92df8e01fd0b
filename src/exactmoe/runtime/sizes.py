"""Bytes and rates as people write them."""

import re

from exactmoe.errors import ConfigError

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_bytes(name: str, text: str) -> int:
    """ "96GiB", "1.5 GB", "1024" -> bytes.

    Raises:
        ConfigError: no number with one of the units; `name` is what the message calls it.
    """
    found = _bytes(text)
    if found is None:
        raise ConfigError(f"{name} is {text!r}; allowed: bytes such as 96GiB, 80GB, 512MiB")
    return found


def _bytes(text: str) -> int | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        return None
    return round(float(match[1]) * _UNITS[match[2].upper()])


def parse_all_bytes(name: str, text: str) -> tuple[int, ...]:
    """Comma-separated sizes, at least one."""
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise ConfigError(f"{name} is {text!r}; allowed: bytes such as 96GiB, separated by commas")
    return tuple(parse_bytes(name, part) for part in parts)


def parse_rates(name: str, text: str) -> tuple[float, ...]:
    """ "4.5TB/s,273GB/s" -> bytes a second, each above 0."""
    rates = []
    for part in text.split(","):
        size, slash, second = part.strip().partition("/")
        rate = _bytes(size) if slash and second == "s" else None
        if not rate:
            raise ConfigError(f"{name} is {text!r}; allowed: rates such as 4.5TB/s, 273GB/s")
        rates.append(float(rate))
    return tuple(rates)


def gib(nbytes: float) -> str:
    """As GiB, the unit of a card's memory; small amounts as MiB."""
    if abs(nbytes) < 2**30:
        return f"{nbytes / 2**20:,.1f} MiB"
    return f"{nbytes / 2**30:,.2f} GiB"


def gb(nbytes: float) -> str:
    """As decimal GB, the unit of a file and of a read rate; small amounts as MB."""
    if abs(nbytes) < 1e9:
        return f"{nbytes / 1e6:,.2f} MB"
    return f"{nbytes / 1e9:,.2f} GB"
