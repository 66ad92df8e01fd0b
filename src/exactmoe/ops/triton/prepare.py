"""prepare: what the Triton kernels need to read a packed weight where it lies."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from exactmoe.errors import Unsupported
from exactmoe.formats import PackedWeight, exponent_range
from exactmoe.formats.scales import E8M0_BIAS, power_of_two
from exactmoe.plan import WeightShape


@dataclass(frozen=True, eq=False)
class TritonWeight:
    """A packed weight as the kernels read it, on the weight's device.

    Attributes:
        weight: the packed weight; codes and scales are shared, not copied.
        exponents: int32 [E], p + 127 of MXFP4; else int32 [1], not read.
        factors: float32 [E], the global scales of NVFP4 or 2^p of MXFP4; else float32 [1], not
            read.
    """

    weight: PackedWeight
    exponents: Tensor
    factors: Tensor

    @property
    def format(self) -> str:
        return self.weight.format

    @cached_property
    def shape(self) -> WeightShape:
        """What a plan chooses kernels by; codes that move are prepared again."""
        return WeightShape.of(self.weight.format, self.weight.codes)

    @property
    def divide(self) -> bool:
        """Whether the accumulator is divided by its factor."""
        return self.weight.format == "nvfp4" and self.weight.global_scale_op == "divide"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The tuple of kernels/triton/project.py: codes, scales, exponents, factors, strides."""
        codes, scales = self.weight.codes, self.weight.scales
        scale_strides = (0, 0) if scales is None else scales.stride()[:2]
        return (
            codes,
            self.factors if scales is None else scales,
            self.exponents,
            self.factors,
            *codes.stride()[:2],
            *scale_strides,
        )


def prepare(weight: PackedWeight) -> TritonWeight:
    """Addresses and epilogue factors of a weight [E, N, K]; no host reads the device.

    Raises:
        Unsupported: rows that are not contiguous.
    """
    for name, tensor in (("codes", weight.codes), ("scales", weight.scales)):
        if tensor is not None and tensor.stride(2) != 1 and tensor.shape[2] > 1:
            raise Unsupported(f"{name} have strides {tensor.stride()}; allowed: the last stride 1")
    exponents = torch.zeros(1, dtype=torch.int32, device=weight.device)
    factors = torch.ones(1, dtype=torch.float32, device=weight.device)
    if weight.format == "mxfp4":
        _, largest = exponent_range(weight)
        exponents = (largest + E8M0_BIAS).int()
        factors = power_of_two(largest)
    elif weight.global_scale is not None:
        factors = weight.global_scale.contiguous()
    return TritonWeight(weight, exponents, factors)
