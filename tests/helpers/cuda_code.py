"""Machine code of the run-time compiled kernels: every variant that the path can launch, compiled
and disassembled. It needs NVRTC and triton's cuobjdump, not a card.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from exactmoe.kernels.cuda.compile import cubin
from exactmoe.kernels.cuda.source import TOKENS, UNITS, WIDEST_GATHER, Pack, Variant
from exactmoe.plan.tiles import TILES, WIDEST_ON_BF16

FORMATS = ("nvfp4", "mxfp4")
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;\s+/\*", re.M)
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


def variants() -> list[Variant]:
    """What ops/cuda/experts.py makes of the tiles in class a16, in both formats and with both types
    of slots.
    """
    return [
        Variant(format, tile.tokens, tile.tokens <= WIDEST_GATHER, wide)
        for format, tile, wide in product(FORMATS, TILES["cuda"]["gate_up"], (False, True))
    ]


def a8_variants() -> list[Variant]:
    """The same in class a8: units of gate, up and down."""
    found = []
    for format, units in product(FORMATS, UNITS):
        widest = max(TOKENS["a8"]) if units == "fp8" else WIDEST_ON_BF16
        for tile in TILES["cuda_a8"]["gate_up"]:
            if tile.tokens <= widest:
                gather = units == "fp8" and tile.tokens <= WIDEST_GATHER
                found.append(Variant(format, tile.tokens, gather, True, "a8", units))
    return found


def variant_name(variant: Variant) -> str:
    """For a test's id: "nvfp4 40 f32", "mxfp4 8 a8 fp8 gather"."""
    of = f" a8 {variant.units}" if variant.activation == "a8" else " f32" * variant.slot_f32
    return f"{variant.format} {variant.tokens}{of}" + " gather" * variant.gather


@dataclass(frozen=True)
class Code:
    """Instructions in the order of their addresses, without the branch's predicate.

    Attributes:
        main: of the kernel.
        addresses: of those.
        division: of the routine that a division calls where its operands or result are near the
            ends of float32; nothing if there is no call.
        calls: how many calls, all to that routine.
        registers: of a thread at the start.
        stack: bytes of a thread.
        shared: bytes of a block, the 1024 of the system included.
    """

    main: tuple[str, ...]
    addresses: tuple[int, ...]
    division: tuple[str, ...]
    calls: int
    registers: int
    stack: int
    shared: int

    @property
    def counts(self) -> Counter[str]:
        """Of the kernel's instructions, by name."""
        return Counter(name(text) for text in self.main)

    def loop(self, first: int, last: int) -> range:
        """Places of the innermost loop around two instructions, given by their places.

        Raises:
            AssertionError: there is none.
        """
        bodies = []
        for place in range(last, len(self.main)):
            jump = re.fullmatch(r"BRA (?:!?U?P\d+, )?0x([0-9a-f]+)", self.main[place])
            if jump is not None and int(jump[1], 16) <= self.addresses[first]:
                bodies.append(range(self.addresses.index(int(jump[1], 16)), place + 1))
        assert bodies, f"no loop around {self.main[first]}"
        return min(bodies, key=len)


def name(text: str) -> str:
    """Of an instruction, with its suffixes."""
    return text.split()[0]


@cache
def code(variant: Variant | Pack) -> Code:
    """The machine code of a variant."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(variant))
        file.flush()
        text, usage = (_cuobjdump(option, file.name) for option in ("-sass", "-res-usage"))
    lines = [(int(a, 16), _PREDICATE.sub("", text)) for a, text in _LINE.findall(text)]
    targets = [int(text.split()[-1], 16) for _, text in lines if text.startswith("CALL")]
    assert len(set(targets)) <= 1, targets
    end = targets[0] if targets else lines[-1][0] + 1
    return Code(
        main=tuple(text for address, text in lines if address < end),
        addresses=tuple(address for address, _ in lines if address < end),
        division=tuple(text for address, text in lines if address >= end),
        calls=len(targets),
        registers=_number("REG", usage),
        stack=_number("STACK", usage),
        shared=_number("SHARED", usage),
    )


def _cuobjdump(option: str, path: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([program, option, path], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _number(what: str, usage: str) -> int:
    return int(re.findall(rf"\b{what}:(\d+)", usage)[-1])
