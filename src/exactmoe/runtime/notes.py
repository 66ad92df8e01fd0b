"""What the log of the package says once, however often it happens."""

import logging
from collections.abc import Callable, Hashable

_log = logging.getLogger("exactmoe")
_said: set[Hashable] = set()


def once(level: int, key: Hashable, text: Callable[[], str]) -> None:
    """Log a line unless one was logged with this key, or with the same words, in this process."""
    if key in _said:
        return
    _said.add(key)
    line = text()
    if line not in _said:
        _said.add(line)
        _log.log(level, line)
