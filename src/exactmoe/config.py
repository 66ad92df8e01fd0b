"""Frozen, complete, checked descriptions of a layer.

`Numerics` holds everything that may decide a bit, and nothing else does. `Placement` and `Limits`
choose where and in which pieces the work runs; by the bit contract they cannot change a result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Self, cast

import torch

from exactmoe.errors import ConfigError, Unsupported

CONTRACT_VERSION = 1
"""Version of the bit contract (docs/numerics.md). A change of bits is a new one."""

MAX_EXPERTS = 1024
MAX_TOP_K = 64
# Types of torch devices that have a path here.
DEVICE_TYPES = ("cpu", "cuda")
_DEVICES = ", ".join(DEVICE_TYPES)
# Partitions that have a name, and what cards may send back.
PARTITIONS = ("even", "fit")
RETURNS = ("auto", "slots", "partials")
_PARTITION = f"{', '.join(PARTITIONS)}, or the card's number of each expert"
# Names of the contract's classes.
PRESETS = ("a16", "a8")
# Tokens a piece, by default.
_ROWS_ON_CPU, _ROWS_ON_GPU = 512, 4096

# The arithmetic is float32: numbers outside of these bounds become 0 or Inf in it.
_FLOAT32_ZERO = 2.0**-150
_FLOAT32_INF = 2.0**128 - 2.0**103


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


def _require_choice(name: str, value: object, *allowed: str) -> None:
    _require(value in allowed, name, value, ", ".join(allowed))


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool)
    fits = fits and value >= low and (high is None or value <= high)  # type: ignore[operator]
    _require(fits, name, value, f"an integer from {low}" + ("" if high is None else f" to {high}"))


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and _FLOAT32_ZERO < value < _FLOAT32_INF  # type: ignore[operator]


class _FromDict:
    """Construction from a mapping that refuses unknown and missing keys, and the way back."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.__name__} from {values!r}; allowed: a mapping of its fields")
        defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
        unknown = [key for key in values if key not in defaults]
        if unknown:
            raise ConfigError(f"{cls.__name__} has no field {unknown}; known: {list(defaults)}")
        missing = [n for n, d in defaults.items() if d is MISSING and n not in values]
        if missing:
            raise ConfigError(f"{cls.__name__} misses {missing}; allowed: every field is given")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Numerics(_FromDict):
    """What decides bits (contract version 1, docs/numerics.md).

    Attributes:
        activation: "a16" (bf16 rows enter the dots) or "a8" (e4m3 codes with one power-of-two scale
            per 128).
        units: "auto" decides bf16 or fp8 operands per expert and projection from its bytes (a8
            only); "bf16" or "fp8" fixes them for the whole model. Where an architecture has no fp8
            row, and on the CPU, all run as bf16.
        slot: type of one expert's output for one token before the combine: "bf16" or "f32". `a8`
            has f32 slots.
        output: type of y: "bf16" or "f32".
        router: "f32", or "bf16_ladder" (rounds score, key, running sum and weight to bf16; selects
            other experts).
    """

    activation: str = "a16"
    units: str = "bf16"
    slot: str = "bf16"
    output: str = "bf16"
    router: str = "f32"

    def __post_init__(self) -> None:
        _require_choice("numerics.activation", self.activation, "a16", "a8")
        _require_choice("numerics.units", self.units, "auto", "bf16", "fp8")
        _require_choice("numerics.slot", self.slot, "bf16", "f32")
        _require_choice("numerics.output", self.output, "bf16", "f32")
        _require_choice("numerics.router", self.router, "f32", "bf16_ladder")
        if self.activation == "a16":
            _require_choice("numerics.units with activation a16", self.units, "bf16")
        else:
            _require_choice("numerics.slot with activation a8", self.slot, "f32")

    @property
    def a8_units(self) -> str:
        """`units` of class `a8`; "" in `a16`, which has one kind."""
        return self.units if self.activation == "a8" else ""

    @classmethod
    def preset(cls, name: str) -> Self:
        """The named class of the contract: "a16" or "a8"."""
        if name == "a16":
            return cls()
        _require(name == "a8", "numerics", name, f"{', '.join(PRESETS)}, or a Numerics")
        return cls(activation="a8", units="auto", slot="f32")

    @classmethod
    def of(cls, value: "str | Numerics") -> "Numerics":
        """A preset by name, or the given Numerics."""
        return value if isinstance(value, Numerics) else cls.preset(value)


@dataclass(frozen=True)
class RouterConfig(_FromDict):
    """How scores become expert ids and weights (contract section 6).

    Attributes:
        score: "sigmoid" (GLM) or "sqrt_softplus" (DeepSeek-V4).
        factor: routed scaling factor, applied once, inside the weights.
        normalize: divide the weights by their sum (+1e-20) before the factor.
    """

    score: str
    factor: float = 1.0
    normalize: bool = True

    def __post_init__(self) -> None:
        _require_choice("score", self.score, "sigmoid", "sqrt_softplus")
        _require(_is_positive(self.factor), "factor", self.factor, "a finite float32 > 0")
        _require(isinstance(self.normalize, bool), "normalize", self.normalize, "True, False")


def checked_swiglu_limit(value: float | None) -> float | None:
    """The clamp of SwiGLU; None and 0 mean no clamp. Negative, NaN and Inf raise ConfigError."""
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    allowed = "None or 0 (no clamp), or a finite float32 > 0"
    _require(_is_positive(value), "swiglu_limit", value, allowed)
    return float(value)


@dataclass(frozen=True)
class MoEConfig(_FromDict):
    """Geometry and numerics of one MoE block.

    Attributes:
        hidden_size: H, width of x and y.
        intermediate_size: I, width of one routed expert.
        num_experts: E, routed experts of the layer (at most 1024).
        top_k: K, experts a token.
        swiglu_limit: gate is clamped from above and up from both sides at this value; None: no
            clamp.
        numerics: "a16", "a8" or a Numerics.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    swiglu_limit: float | None = None
    numerics: Numerics | str = "a16"

    def __post_init__(self) -> None:
        _require_int("hidden_size", self.hidden_size, 1)
        _require_int("intermediate_size", self.intermediate_size, 1)
        _require_int("num_experts", self.num_experts, 1, MAX_EXPERTS)
        _require_int("top_k", self.top_k, 1, MAX_TOP_K)
        object.__setattr__(self, "swiglu_limit", checked_swiglu_limit(self.swiglu_limit))
        numerics: Any = self.numerics
        if isinstance(numerics, Mapping):
            numerics = Numerics.from_dict(numerics)
        object.__setattr__(self, "numerics", Numerics.of(numerics))

    def with_numerics(self, numerics: "Numerics | str") -> "MoEConfig":
        """The same geometry with other numerics."""
        return replace(self, numerics=numerics)


def _require_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        allowed = f"a device name such as cpu or cuda:0 (this version runs on: {_DEVICES})"
        raise ConfigError(f"card is {name!r}; allowed: {allowed}") from None
    if device.type not in DEVICE_TYPES:
        raise Unsupported(f"card is {name!r}; this version runs on: {_DEVICES}")


def _checked_partition(value: object, num_cards: int) -> str | tuple[int, ...] | None:
    if value is None or isinstance(value, str):
        _require(value in (None, *PARTITIONS), "partition", value, _PARTITION)
        return value
    _require(isinstance(value, Sequence) and len(value) > 0, "partition", value, _PARTITION)
    for expert, card in enumerate(cast(Sequence[Any], value)):
        _require_int(f"owner of expert {expert}", card, 0, num_cards - 1)
    return tuple(cast(Sequence[int], value))


@dataclass(frozen=True)
class Placement(_FromDict):
    """Where the experts of a layer live. It cannot change a bit.

    Attributes:
        cards: device names of this process, one a card, for example ("cuda:0", "cuda:1") or
            ("cpu", "cpu"). Tokens live on the first, which is their owner.
        partition: which card owns which expert: "even"; "fit", by the memory that is free on each
            card when a checkpoint is loaded; or the card's number of each expert
            (`Partition(...).owners`). None: as the bank is split already; "fit" in `load_model`,
            else "even".
        returns: what the other cards send back. "slots": their slots, for any partition.
            "partials": one float32 vector a token for each complete subtree of the combine, where
            no two cards share one of its 8 groups. "auto": partials where every other card needs
            one vector, else slots.
        serial: one card after the other, without overlap: a control for measurements.

    Raises:
        ConfigError: no sequence of names, torch knows no device of a name, or another field has a
            value that is not allowed.
        Unsupported: nothing here runs on a device of that type.
    """

    cards: Sequence[str] = ("cpu",)
    partition: str | Sequence[int] | None = None
    returns: str = "auto"
    serial: bool = False

    def __post_init__(self) -> None:
        listed = isinstance(self.cards, Sequence) and not isinstance(self.cards, str)
        names = listed and len(self.cards) > 0 and all(isinstance(c, str) and c for c in self.cards)
        _require(names, "cards", self.cards, "a non-empty sequence of device names")
        for name in self.cards:
            _require_device(name)
        object.__setattr__(self, "cards", tuple(self.cards))
        object.__setattr__(self, "partition", _checked_partition(self.partition, len(self.cards)))
        _require_choice("returns", self.returns, *RETURNS)
        _require(isinstance(self.serial, bool), "serial", self.serial, "True, False")


@dataclass(frozen=True)
class Limits(_FromDict):
    """Sizes of the workspace, and when faults are looked at. They cannot change a bit.

    Attributes:
        max_rows: tokens the workspace holds; a wider call runs in pieces of this many. None: 512 on
            a CPU; 4096 on a GPU, where each piece of a prefill reads all experts again.
        checks: read the fault word after every call and raise at once for an expert id >= E.
    """

    max_rows: int | None = None
    checks: bool = False

    def __post_init__(self) -> None:
        if self.max_rows is not None:
            checked_max_rows(self.max_rows)
        _require(isinstance(self.checks, bool), "checks", self.checks, "True, False")

    def rows_on(self, device: torch.device) -> int:
        """Tokens a piece on a device: `max_rows`, or its default there."""
        if self.max_rows is not None:
            return self.max_rows
        return _ROWS_ON_GPU if device.type == "cuda" else _ROWS_ON_CPU


def checked_max_rows(value: object) -> int:
    """Tokens a piece that were named. ConfigError: no positive integer."""
    _require_int("max_rows", value, 1)
    return cast(int, value)


def checked_width(value: object) -> int:
    """Tokens of a call that is asked about. ConfigError: no positive integer."""
    _require_int("width", value, 1)
    return cast(int, value)


def checked_limits(value: object) -> Limits:
    """Limits as they were given, None: the defaults. ConfigError: something else."""
    if value is None:
        return Limits()
    if not isinstance(value, Limits):
        raise ConfigError(f"limits is {value!r}; allowed: Limits(...), or None")
    return value


__all__ = [
    "CONTRACT_VERSION",
    "DEVICE_TYPES",
    "MAX_EXPERTS",
    "MAX_TOP_K",
    "PRESETS",
    "Limits",
    "MoEConfig",
    "Numerics",
    "Placement",
    "RouterConfig",
    "checked_limits",
    "checked_max_rows",
    "checked_swiglu_limit",
    "checked_width",
]
