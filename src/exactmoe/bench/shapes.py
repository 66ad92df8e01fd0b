"""Shapes that are benchmarked: one MoE block of a model, by name or as H,I,E,K."""

from dataclasses import dataclass

from exactmoe.config import MoEConfig, RouterConfig
from exactmoe.errors import ConfigError
from exactmoe.formats import BLOCK, FP4_FORMATS


@dataclass(frozen=True)
class Shape:
    """Geometry of one MoE block and of the dense MLPs beside it.

    Attributes:
        name: "glm", "deepseek", "small", or the four numbers that were given.
        hidden_size, intermediate_size, num_experts, top_k: H, I, E, K of the routed experts.
        shared_size: intermediate size of the shared expert, bfloat16.
        dense_sizes: intermediate sizes of the dense MLPs that are timed alone, bfloat16.
        format: of the routed experts in the published checkpoints.
        router: how scores become weights.
        swiglu_limit: clamp of gate and up.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    shared_size: int
    dense_sizes: tuple[int, ...]
    format: str
    router: RouterConfig
    swiglu_limit: float = 10.0

    def config(self, numerics: str) -> MoEConfig:
        """The layer of this shape in a class of arithmetic ("a16", "a8")."""
        return MoEConfig(
            self.hidden_size,
            self.intermediate_size,
            self.num_experts,
            self.top_k,
            self.swiglu_limit,
            numerics,
        )


_GLM_ROUTER = RouterConfig(score="sigmoid", factor=2.5)
_DEEPSEEK_ROUTER = RouterConfig(score="sqrt_softplus", factor=1.5)
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("glm", 4096, 2048, 288, 8, 2048, (12288, 2048), "nvfp4", _GLM_ROUTER),
        Shape("deepseek", 4096, 2048, 256, 6, 2048, (2048,), "mxfp4", _DEEPSEEK_ROUTER),
        # For a CPU: seconds, on any machine.
        Shape("small", 512, 256, 32, 4, 256, (1024, 256), "nvfp4", _GLM_ROUTER),
    )
}


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or "H,I,E,K" (then the dense parts are of size I).

    Raises:
        ConfigError: neither, or sizes that no layer has.
    """
    if text in SHAPES:
        return SHAPES[text]
    allowed = f"{', '.join(SHAPES)}, or H,I,E,K (four positive integers, K at most E)"
    try:
        hidden, inner, experts, top_k = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--shape is {text!r}; allowed: {allowed}") from None
    block = max(BLOCK[name] for name in FP4_FORMATS)
    if min(hidden, inner, experts, top_k) < 1 or top_k > experts:
        raise ConfigError(f"--shape is {text!r}; allowed: {allowed}")
    if hidden % block or inner % block:
        raise ConfigError(f"--shape is {text!r}; allowed: H and I that are multiples of {block}")
    glm = SHAPES["glm"]
    return Shape(text, hidden, inner, experts, top_k, inner, (inner,), glm.format, glm.router)
