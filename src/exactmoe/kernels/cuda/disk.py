"""Compiled kernels on disk, each in a file named after all that it was made from."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from exactmoe import env

_DIGEST_BYTES = 32


def folder() -> Path:
    """Where they are: EXACTMOE_CACHE, or ~/.cache/exactmoe."""
    return env.read("EXACTMOE_CACHE") or Path.home() / ".cache" / "exactmoe"


def kept(source: str, compile: Callable[[], bytes]) -> bytes:
    """The machine code of `source`: read, or compiled and written whole.

    A file that was cut or changed is compiled again; a folder that cannot be written is said once a
    kernel, and nothing else is lost.
    """
    path = folder() / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.cubin"
    if path.is_file():
        stored = path.read_bytes()
        code, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    code = compile()
    try:
        _write(path, code + hashlib.sha256(code).digest())
    except OSError as error:
        logging.getLogger("exactmoe").warning(
            "a compiled kernel cannot be kept in %s (%s); EXACTMOE_CACHE names another folder",
            path.parent,
            error,
        )
    return code


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
