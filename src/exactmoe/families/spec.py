"""What a family says about a model: one LayerSpec per layer, and which tensors are nobody's MLP."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from exactmoe.config import MoEConfig, Numerics, RouterConfig
from exactmoe.errors import ConfigError

PROJECTIONS = ("gate", "up", "down")
# Word of a tensor that holds all experts of a layer -> the projections in it, in order.
STACKED_PROJECTIONS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}

# Name of the rule that ignores multi-token prediction layers.
MTP_RULE = "mtp"


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

    @property
    def experts(self) -> str:
        """The routed experts of the block."""
        return f"{self.block}.experts"

    def expert(self, expert: int, projection: str) -> str:
        """One projection of one routed expert."""
        return f"{self.experts}.{expert}.{self.projections[projection]}"

    def stacked(self, word: str) -> str:
        """All experts' projections in one tensor; `word` is a key of STACKED_PROJECTIONS."""
        return f"{self.experts}.{word}"

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
        is_mtp: a multi-token prediction layer, counted after the last layer.
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
    is_mtp: bool = False

    def is_in(self, tensor_names: Collection[str] | None) -> bool:
        """Whether a checkpoint has a tensor of this block; None: any may be there."""
        block = f"{self.names.block}."
        return tensor_names is None or any(name.startswith(block) for name in tensor_names)


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
        mtp_layers: specs of the multi-token prediction layers, indices from `num_layers`. A model
            is loaded without them.
    """

    model_type: str
    numerics: Numerics
    layers: tuple[LayerSpec, ...]
    ignore: tuple[IgnoreRule, ...]
    mtp_layers: tuple[LayerSpec, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of the model, without multi-token prediction."""
        return len(self.layers)

    def layer(self, index: int) -> LayerSpec:
        """The spec of one layer, multi-token prediction layers after the last one; ConfigError
        when the model has no such layer.
        """
        layers = (*self.layers, *self.mtp_layers)
        if not 0 <= index < len(layers):
            mtp = f" (multi-token prediction from {self.num_layers})" if self.mtp_layers else ""
            raise ConfigError(f"layer is {index!r}; allowed: 0 to {len(layers) - 1}{mtp}")
        return layers[index]

    def ignored_by(self, tensor: str, spec: LayerSpec | None = None) -> IgnoreRule | None:
        """The first rule that covers the tensor of this name. For a load of the multi-token
        prediction layer `spec` the rule that leaves such layers alone does not count.
        """
        is_mtp = spec is not None and spec.is_mtp
        rules = (rule for rule in self.ignore if not (is_mtp and rule.name == MTP_RULE))
        return next((rule for rule in rules if rule.matches(tensor)), None)
