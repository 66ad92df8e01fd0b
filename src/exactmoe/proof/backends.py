"""Backends of a layer under proof: which it has on its device, and a layer that uses another one.

All CPU backends add in one order, so they are compared byte by byte with the reference. A GPU's
dots have the order of its matrix instruction (contract section 4): its paths are compared with each
other, and their stages with the reference (proof/stages.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from exactmoe import ops
from exactmoe.bank import ExpertBank
from exactmoe.dense import DenseMLP
from exactmoe.errors import ConfigError, Unsupported
from exactmoe.formats import PackedWeight
from exactmoe.layer import MoELayer
from exactmoe.plan.choose import BACKENDS

CPU_BACKENDS = ("cpu", "reference")

Layer = MoELayer | DenseMLP


def gpu_order(layer: Layer) -> bool:
    """Whether the layer's path adds in the order of a GPU's matrix instruction."""
    return layer.plan().backend not in CPU_BACKENDS


def parts(layer: Layer) -> list[Layer]:
    """The layer and its shared expert, which has a backend of its own."""
    shared = None if isinstance(layer, DenseMLP) else layer.shared
    return [layer] if shared is None else [layer, shared]


@contextmanager
def using(layer: Layer, backend: str) -> Iterator[None]:
    """While it lasts, the layer runs on another backend. Another path may need more workspace.

    Raises:
        ConfigError, Unsupported: the layer cannot run on it; the layer is as it was.
    """
    before = [part.backend for part in parts(layer)]
    try:
        for part in parts(layer):
            part.backend = backend
        layer.reserve(layer.max_rows)
        yield
    finally:
        for part, name in zip(parts(layer), before, strict=True):
            part.backend = name


def paths_of(layer: Layer) -> list[str]:
    """The backend that the layer uses now, and then the others of the same order that its device
    offers for it.
    """
    used = layer.plan().backend
    others = [name for name in BACKENDS if name != used]
    return [used, *(name for name in others if _fits(layer, name, used))]


def _fits(layer: Layer, name: str, used: str) -> bool:
    if (name in CPU_BACKENDS) != (used in CPU_BACKENDS):
        return False
    before = layer.backend
    try:
        layer.backend = name
        return layer.plan().backend == name
    except (ConfigError, Unsupported):
        return False  # the plan of the layer says why (`layer.explain()`)
    finally:
        layer.backend = before


def canonical_twin(layer: Layer, backend: str) -> Layer:
    """The same layer on another backend, with copies of the canonical bytes of its experts.

    A bank is in the order of one path only, and that path may rearrange it in place. Router and
    dense weights are shared. Memory: the experts once more.
    """
    if isinstance(layer, DenseMLP):
        bank = layer.bank
        return DenseMLP(
            bank.gate,
            bank.up,
            bank.down,
            layer.swiglu_limit,
            layer.limits,
            backend,
            layer.numerics.output,
        )
    shared = layer.shared
    twin = None if shared is None else canonical_twin(shared, backend)
    gate, up, down = (_copied(weight) for weight in layer.bank.weights())
    return MoELayer(
        layer.config,
        ExpertBank(gate, up, down),
        layer.router,
        twin if isinstance(twin, DenseMLP) else None,
        limits=layer.limits,
        backend=backend,
    )


def _copied(weight: PackedWeight) -> PackedWeight:
    scales, global_scale = weight.scales, weight.global_scale
    return replace(
        weight,
        codes=weight.codes.clone(),
        scales=None if scales is None else scales.clone(),
        global_scale=None if global_scale is None else global_scale.clone(),
    )


def wide_twin(layer: Layer) -> Layer:
    """The same weights (no copy) without a shared expert, results in float32: what the one rounding
    of y reads.
    """
    if isinstance(layer, DenseMLP):
        bank, backend = layer.bank, layer.backend
        return DenseMLP(
            bank.gate, bank.up, bank.down, layer.swiglu_limit, layer.limits, backend, "f32"
        )
    numerics = replace(layer.numerics, output="f32")
    config = layer.config.with_numerics(numerics)
    return MoELayer(config, layer.bank, layer.router, limits=layer.limits, backend=layer.backend)


def path_for_canonical(layer: Layer) -> str:
    """The backend whose kernels run the layer's dense parts: those of a path with a layout of its
    own are the portable ones.
    """
    used = layer.plan().backend
    return used if ops.path(used).storage.layout == ops.CANONICAL else "triton"
