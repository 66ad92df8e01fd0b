"""Runs the text of a CUDA kernel on the CPU: threads in an order that a seed decides, copies and
matrix instructions at random times, every access checked.

tests/helpers/emulator holds the machine. It finds races, deadlocks, accesses out of range and wrong
use of barriers; its float sums are not the card's bits.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from platform import machine
from typing import Any

from torch import Tensor

from exactmoe.kernels.cuda.disk import folder

_KERNELS = "exactmoe.kernels.cuda"
_FOLDER = Path(__file__).parent / "emulator"
_OPTIONS = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-g1")
# The sanitizer's calls ahead of every access go to the machine; its own library is not linked.
_CHECKED = ("-O1", "-w", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
_MOST_STEPS = 1 << 28  # turns of threads: minutes
_MOST_ARGUMENTS = 64
ALL = 1 << 32
_UNITS = {"k16.f32.bf16.bf16": "BF16", "k32.f32.e4m3.e4m3": "E4M3"}
_MATRIX = re.compile(
    r'u64 rows(?:, bool more)?\) \{\s*asm volatile\(\s*(?:"\{[^"]*"\s*)?'
    r'"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(k\S+) "\s*'
    r'"\{.*?\}, \{.*?\}, %\d+, (\w+), 1, 1(?:, 0)?;.*?\);\n',
    re.S,
)
_MATRIX_DECLARED = re.compile(r"^(template <int N> __device__ void wgmma\w*\(.*)\);$", re.M)
_DYNAMIC = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")


@dataclass(frozen=True)
class Order:
    """The order in which things happen.

    Attributes:
        seed: that decides it.
        together: blocks that live at the same time; the others begin when one of these ends.
    """

    seed: int
    together: int = ALL


class EmulatorError(AssertionError):
    """What the emulated machine refused: a race, a deadlock, an access out of range."""


class _Given(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("written", ctypes.c_uint32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("most_steps", ctypes.c_uint64),
        ("most_blocks", ctypes.c_uint64),
        ("entry", ctypes.c_void_p),
        ("statics", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("num_buffers", ctypes.c_uint64),
    ]


def missing() -> str | None:
    """Why nothing can be emulated here; None if it can."""
    if (sys.platform, machine()) != ("linux", "x86_64"):
        return f"the emulator runs on Linux on x86_64, this is {sys.platform} on {machine()}"
    return None if shutil.which("g++") else "the emulator needs g++"


def run(
    text: str,
    entry: str,
    grid: tuple[int, int, int],
    shared_bytes: int,
    arguments: Sequence[Any],
    reads: Mapping[str, Tensor],
    writes: Mapping[str, Tensor],
    order: "int | Order",
) -> None:
    """Run a kernel on CPU tensors; what it writes lies in `writes` afterwards.

    Args:
        text: CUDA C++, as Variant.text() gives it.
        entry: the kernel's name.
        grid: blocks in two directions, and threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: tensors (their address), None, and ctypes values.
        reads: by name, all tensors that the kernel may only read.
        writes: and those that it may read and write.
        order: in which things happen, or its seed alone.

    Raises:
        EmulatorError: the kernel did something that the machine refuses.
    """
    order = order if isinstance(order, Order) else Order(order)
    module = _module(text, entry)
    values = [_value(argument) for argument in arguments]
    _require_sizes(module, values)
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    buffers = [_given(name, tensor, 0) for name, tensor in reads.items()]
    buffers += [_given(name, tensor, 1) for name, tensor in writes.items()]
    given = (_Given * len(buffers))(*buffers)
    launch = _Launch(
        *(*grid, shared_bytes, order.seed, _MOST_STEPS, order.together),
        ctypes.cast(module.emulated_call, ctypes.c_void_p),
        ctypes.cast(module.emulated_statics, ctypes.c_void_p),
        ctypes.addressof(places),
        ctypes.addressof(given),
        len(buffers),
    )
    error = _machine().emulator_run(ctypes.byref(launch))
    if error is not None:
        raise EmulatorError(f"seed {order.seed}: " + _with_lines(error.decode(), module._name))


def _value(argument: Any) -> Any:
    if isinstance(argument, Tensor) or argument is None:
        return ctypes.c_void_p(0 if argument is None else argument.data_ptr())
    return argument


def _given(name: str, tensor: Tensor, written: int) -> _Given:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    count = last + 1 if tensor.numel() else 0
    return _Given(name.encode(), tensor.data_ptr(), count * tensor.element_size(), written)


def _require_sizes(module: ctypes.CDLL, values: Sequence[Any]) -> None:
    found = (ctypes.c_uint32 * _MOST_ARGUMENTS)()
    module.emulated_sizes(found)
    wanted = [size for size in found if size]
    sizes = [ctypes.sizeof(value) for value in values]
    if wanted != sizes:
        raise EmulatorError(f"the arguments have {sizes} bytes; the kernel takes {wanted}")


# ---- text


def emulated_text(text: str, entry: str) -> str:
    """The text with what the machine gives in place of PTX, and lines named after their files."""
    places = sorted((text.find(first), name) for name, first in _first_lines().items())
    places = [(place, name) for place, name in places if place >= 0]
    if "ptx.cuh" not in [name for _, name in places]:
        raise EmulatorError("the text does not hold ptx.cuh, which the machine replaces")
    parts = [text[: places[0][0]]]
    for (place, name), (end, _) in zip(places, [*places[1:], (len(text), "")], strict=True):
        part = text[place:end]
        if name == "ptx.cuh":  # as it is here, or changed: then up to the next file's part
            part = part.removeprefix(_part(name)) if part.startswith(_part(name)) else ""
            parts.append(part)
        else:
            parts.append(f'#line 1 "{name}"\n{part}')
    text = _MATRIX_DECLARED.sub(r"\1, WHERE);", "".join(parts))
    text = _MATRIX.sub(_matrix, text)
    text = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared());", text)
    left = re.search(r"^.*\basm\b.*$", text, re.M)
    if left is not None:
        raise EmulatorError(f"the machine does not know the instruction in: {left[0].strip()}")
    return _BEFORE + text + _AFTER.replace("ENTRY", entry)


def _first_lines() -> dict[str, str]:
    """Of the kernels' files, by which their parts of a text are found, changed or not."""
    names = [path.name for path in files(_KERNELS).iterdir() if ".cu" in path.name]
    return {name: _part(name).partition("\n")[0] for name in names}


def _part(name: str) -> str:
    return (files(_KERNELS) / name).read_text(encoding="utf-8")


_BEFORE = '#include "device.h"\nstatic thread_local u8 emulated_begin[16];\n'
_AFTER = """
extern "C" void emulated_call(void* const* values) { emulator::call(ENTRY, values); }
extern "C" void* emulated_statics() { return emulated_begin; }
extern "C" void emulated_sizes(u32* found) { emulator::sizes(ENTRY, found); }
"""


def _matrix(match: re.Match[str]) -> str:
    columns, kind, go_on = match.groups()
    more, flag = {"go_on": (", bool more", "more"), "1": ("", "true")}[go_on]
    arguments = f"emulator::{_UNITS[kind]}, {columns}, sums, a, rows, {flag}, where"
    return f"u64 rows{more}, emulator::Where where) {{\n    emulator::matrix({arguments});\n"


# ---- compiling


@cache
def _machine() -> ctypes.CDLL:
    parts = [f'#include "{path.name}"\n' for path in sorted(_FOLDER.glob("*.cpp"))]
    library = ctypes.CDLL(str(_compiled("machine", "".join(parts), ("-O2",))), ctypes.RTLD_GLOBAL)
    library.emulator_run.restype = ctypes.c_char_p
    return library


@cache
def _module(text: str, entry: str) -> ctypes.CDLL:
    _machine()
    return ctypes.CDLL(str(_compiled(entry, emulated_text(text, entry), _CHECKED)))


def _compiled(name: str, text: str, options: Sequence[str]) -> Path:
    """A shared object, from the cache on disk or made anew."""
    headers = "".join(path.read_text(encoding="utf-8") for path in sorted(_FOLDER.iterdir()))
    key = "\0".join((headers, text, *_OPTIONS, *options))
    path = folder() / "emulator" / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        source, code, made = (Path(work) / f"{name}{suffix}" for suffix in (".cpp", ".o", ".so"))
        source.write_text(text, encoding="utf-8")
        _call("g++", *_OPTIONS, *options, f"-I{_FOLDER}", "-c", source, "-o", code)
        _call("g++", "-shared", code, "-o", made)
        made.rename(path)
    return path


def _call(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"{' '.join(words)} failed:\n{done.stderr[:4000]}")
    return done.stdout


def _with_lines(error: str, library: str) -> str:
    """Addresses in the kernel's code as lines of its text."""
    for place in set(re.findall(r"<\+(0x[0-9a-f]+)>", error)):
        function, _, line = _call("addr2line", "-f", "-C", "-e", library, place).partition("\n")
        name = f"{Path(line.split()[0]).name} ({function.partition('(')[0]})"
        error = error.replace(f"<+{place}>", name)
    return error
