"""Launch: a kernel with everything that decides its machine code and its grid."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.ops.triton.prepare import TritonWeight
from exactmoe.plan.architectures import ARCHITECTURES, architecture_name
from exactmoe.plan.tiles import Tile

# AMD's compiler would choose 32 x 32 instructions for wide tiles: other bits.
_AMD_OPTIONS = {"matrix_instr_nonkdim": 16}
# Where k would not ascend by itself: kernels/triton/unpack.py, in_k_order.
_MMA_SYNC = tuple(
    name for name, row in ARCHITECTURES.items() if row.instruction.startswith("mma.sync")
)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: of kernels/triton.
        grid: programs; one dimension of 0 starts nothing.
        arguments: by name: tensors, numbers, tuples of them.
        constants: by name: constexpr arguments that are not the tile's.
        tile: rows, tokens and k of a program.
        architecture: exact, of the device; "cpu" where kernels are interpreted.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tile: Tile
    architecture: str

    @property
    def all_constants(self) -> dict[str, Any]:
        """The constexpr arguments by name, those of tile and architecture included."""
        tile = {
            "PIN": self.architecture in _MMA_SYNC,
            "ROWS": self.tile.rows,
            "BLOCK_M": self.tile.matrix_rows,
            "BLOCK_N": self.tile.tokens,
            "BLOCK_K": self.tile.columns,
        }
        return self.constants | tile

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's; the contract forbids that it fuses anything."""
        settings = {
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
            "enable_fp_fusion": False,
        }
        return settings | _AMD_OPTIONS if self.architecture.startswith("gfx") else settings

    def run(self) -> None:
        """Queues it on the current stream of the current device."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.arguments, **self.all_constants, **self.options)


def require_one_format(gate: TritonWeight, up: TritonWeight) -> None:
    """Unsupported unless gate and up, which share a tile, have one format."""
    if gate.format != up.format:
        raise Unsupported(
            f"gate is {gate.format} and up is {up.format}; allowed: one format for both"
        )


def row_arguments(rows: Rows) -> tuple[Any, ...]:
    """(values bfloat16 or codes uint8, row stride, scales, row stride); without scales the last two
    are not read.
    """
    if rows.scales is None:
        return rows.values, rows.values.stride(0), rows.values, 0
    codes = rows.values.view(torch.uint8)
    return codes, codes.stride(0), rows.scales, rows.scales.stride(0)


@lru_cache
def architecture(device: torch.device) -> str:
    """The exact architecture of a device, "cpu" where kernels are interpreted."""
    return architecture_name(device)


def expert_grid(num_slots: int, num_experts: int, tile: Tile) -> tuple[int, dict[str, Any]]:
    """Token tiles of any routing, and the constants that kernels/triton/work.py finds them by.

    The bound does not depend on the routing: a graph captured once serves every one.
    """
    bound = num_slots // tile.tokens + num_experts
    constants = {
        "BY_SLOT": num_slots <= bound,
        "BLOCK_E": triton.next_power_of_2(num_experts),
    }
    return min(num_slots, bound), constants
