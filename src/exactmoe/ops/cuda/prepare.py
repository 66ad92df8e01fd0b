"""prepare: what the sm_90 kernels need to read a packed weight in fragment order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.formats.fragment import largest_exponents, unsupported
from exactmoe.formats.scales import power_of_two

# Bulk copies begin at multiples of this many bytes.
_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class CudaWeight:
    """A packed weight [E, N, K] in fragment order, and its epilogue.

    Attributes:
        format: "nvfp4" or "mxfp4".
        codes: uint8 [E, N, K // 2], the bank's own memory.
        scales: uint8 [E, N, blocks], the bank's own memory.
        factors: float32 [E]: global scales; 2^p for MXFP4.
        divide: the accumulator is divided by the factor.
        units: matrix units that its experts take: "bf16", "fp8", or "both" where they differ.
        on_fp8: uint8 [E]: 1 of the experts on the fp8 units.
    """

    format: str
    codes: Tensor
    scales: Tensor
    factors: Tensor
    divide: bool
    units: str
    on_fp8: Tensor

    @property
    def num_experts(self) -> int:
        return int(self.codes.shape[0])

    @property
    def rows(self) -> int:
        return int(self.codes.shape[1])

    @property
    def columns(self) -> int:
        return 2 * int(self.codes.shape[2])


def prepare(weight: PackedWeight, fp8: Tensor | None = None) -> CudaWeight:
    """A view of a weight whose bytes are in fragment order.

    Args:
        fp8: bool [E]: experts in the order of the fp8 units (formats/fragment_fp8.py); None: none.

    Raises:
        Unsupported: the format or a size has no fragment order, or the bytes lie where bulk copies
            cannot read them.
    """
    reason = unsupported(weight)
    if reason is not None or weight.scales is None:
        raise Unsupported(f"the cuda path cannot read this weight: {reason}")
    for name, tensor in (("codes", weight.codes), ("scales", weight.scales)):
        aligned = tensor.data_ptr() % _ALIGNMENT == 0 and tensor.stride(0) % _ALIGNMENT == 0
        if not tensor[0].is_contiguous() or not aligned:
            raise Unsupported(
                f"{name} have strides {tensor.stride()} at address {tensor.data_ptr():#x}; "
                "allowed: the rows of an expert one after the other, "
                f"experts at multiples of {_ALIGNMENT}"
            )
    factors = weight.global_scale
    if factors is None:
        factors = power_of_two(largest_exponents(weight, fp8))
    divide = weight.global_scale is not None and weight.global_scale_op == "divide"
    on_fp8 = torch.zeros(weight.num_experts, dtype=torch.uint8, device=weight.device)
    if fp8 is not None:
        on_fp8 = fp8.to(torch.uint8)
    return CudaWeight(
        weight.format,
        weight.codes,
        weight.scales,
        factors.contiguous(),
        divide,
        _units(on_fp8),
        on_fp8.contiguous(),
    )


def _units(on_fp8: Tensor) -> str:
    count = int(on_fp8.sum())
    if count == 0:
        return "bf16"
    return "fp8" if count == on_fp8.numel() else "both"
