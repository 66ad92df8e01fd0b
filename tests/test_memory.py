"""What resident experts take: the packed bytes, and what a backend keeps beside them."""

import pytest
import torch

from exactmoe import ops
from exactmoe.formats import PackedWeight
from paths import random_weight


@pytest.mark.parametrize(("format", "share"), [("nvfp4", 0.29), ("mxfp4", 0.27)])
def test_packed_experts_of_the_glm_shape(format, share):
    experts, rows, columns = 64, 2048, 4096
    per_scale = 16 if format == "nvfp4" else 32
    with torch.device("meta"):
        weight = PackedWeight(
            format,
            torch.empty(experts, rows, columns // 2, dtype=torch.uint8),
            torch.empty(experts, rows, columns // per_scale, dtype=torch.uint8),
            torch.empty(experts) if format == "nvfp4" else None,
        )
    assert weight.nbytes <= share * 2 * experts * rows * columns


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_cpu_backend_reads_the_packed_bytes_where_they_lie(format, rng):
    weight = random_weight(rng, format, 4, 64, 256)
    prepared = ops.path("cpu").prepare(weight)
    assert prepared.weight is weight
    assert prepared.experts[:, 0].tolist() == [weight.codes[e].data_ptr() for e in range(4)]
    assert prepared.experts[:, 1].tolist() == [weight.scales[e].data_ptr() for e in range(4)]
    # A dequantised copy would be 262,144 bytes.
    assert sum(array.nbytes for array in prepared.arrays) < 4096
