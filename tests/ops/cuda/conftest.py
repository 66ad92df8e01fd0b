"""The CUDA path takes its other ops from the Triton one, whose kernels are interpreted here."""

from triton_device import use_triton

use_triton()
