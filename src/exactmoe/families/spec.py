"""What a family says about a model: one LayerSpec per layer, and which tensors are nobody's MLP."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from exactmoe.config import MoEConfig, Numerics, RouterConfig
from exactmoe.errors import ConfigError

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class TensorNames:
    """Names, in the checkpoint, of the tensors of one MLP block.

    A projection is named without its last part, which belongs to the dialect (".weight", ".scale").

    Attributes:
        block: the block, for example "model.language_model.layers.3.mlp".
        projections: "gate", "up", "down" -> the checkpoint's word, for example "gate_proj" or "w1".
        router_weight: full name, [E, H]; None in a dense layer.
        router_bias: full name of the selection bias, [E]; None where there is none.
        router_table: full name of the hash table, [V, K]; None where there is none.
    """

    block: str
    projections: Mapping[str, str]
    router_weight: str | None = None
    router_bias: str | None = None
    router_table: str | None = None

    def expert(self, expert: int, projection: str) -> str:
        """One projection of one routed expert."""
        return f"{self.block}.experts.{expert}.{self.projections[projection]}"

    def shared(self, projection: str) -> str:
        """One projection of the shared expert."""
        return f"{self.block}.shared_experts.{self.projections[projection]}"

    def dense(self, projection: str) -> str:
        """One projection of a dense layer."""
        return f"{self.block}.{self.projections[projection]}"


@dataclass(frozen=True)
class LayerSpec:
    """One MLP block of a model.

    Attributes:
        layer: index of the layer.
        kind: "moe" or "dense".
        names: its tensors.
        hidden_size: H.
        intermediate_size: I of one routed expert, or of the dense MLP.
        swiglu_limit: the clamp of routed, shared and dense parts alike; None: no clamp.
        moe: geometry and numerics; None in a dense layer.
        router: score, factor, normalisation; None in a dense layer.
        routing: "score" (top-k of the scores), "hash" (ids from a table by token id); None: dense.
        shared_size: I of the shared expert; None in a dense layer.
        vocab_size: V, rows of a hash table.
    """

    layer: int
    kind: str
    names: TensorNames
    hidden_size: int
    intermediate_size: int
    swiglu_limit: float | None
    moe: MoEConfig | None = None
    router: RouterConfig | None = None
    routing: str | None = None
    shared_size: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class IgnoreRule:
    """Tensors that ExactMoE leaves alone, by a regular expression over the whole name.

    Attributes:
        name: what a load report calls it.
        reason: why nobody here reads these tensors.
        pattern: matches the whole tensor name.
    """

    name: str
    reason: str
    pattern: str

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def matches(self, tensor: str) -> bool:
        """Whether the rule covers the tensor of this name."""
        return self._compiled.fullmatch(tensor) is not None


@dataclass(frozen=True)
class Family:
    """A model as its config describes it.

    Attributes:
        model_type: as config.json names it.
        numerics: of every layer.
        layers: one spec per layer, in order.
        ignore: rules, the first match counts.
    """

    model_type: str
    numerics: Numerics
    layers: tuple[LayerSpec, ...]
    ignore: tuple[IgnoreRule, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layer(self, index: int) -> LayerSpec:
        """The spec of one layer; ConfigError when the model has no such layer."""
        if not 0 <= index < self.num_layers:
            raise ConfigError(f"layer is {index!r}; allowed: 0 to {self.num_layers - 1}")
        return self.layers[index]

    def ignored_by(self, tensor: str) -> IgnoreRule | None:
        """The first rule that covers the tensor of this name."""
        return next((rule for rule in self.ignore if rule.matches(tensor)), None)
