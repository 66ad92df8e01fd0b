"""Reading config.json: what decides a result is never defaulted, what cannot run is named."""

from collections.abc import Mapping
from typing import Any

from exactmoe.config import Numerics, checked_swiglu_limit
from exactmoe.errors import ConfigError, Unsupported


class Fields:
    """Checked access to the fields of one config dict."""

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self._config = config
        self._model_type = model_type

    def __contains__(self, name: str) -> bool:
        return self._config.get(name) is not None

    def _required(self, name: str, kinds: tuple[type, ...], allowed: str) -> Any:
        value = self._config.get(name)
        if value is None:
            raise ConfigError(f"the {self._model_type} config has no {name}; allowed: {allowed}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")
        return value

    def integer(self, name: str, low: int = 1) -> int:
        """A required integer, at least `low`."""
        value: int = self._required(name, (int,), f"an integer from {low}")
        if value < low:
            raise ConfigError(f"{name} is {value}; allowed: an integer from {low}")
        return value

    def number(self, name: str) -> float:
        """A required number."""
        return float(self._required(name, (int, float), "a number"))

    def flag(self, name: str) -> bool:
        """A required boolean."""
        return bool(self._required(name, (bool,), "true, false"))

    def choice(self, name: str, allowed: Mapping[str, str]) -> str:
        """A required word, translated to ours; Unsupported when it has no translation."""
        value = self._required(name, (str,), ", ".join(allowed))
        if value not in allowed:
            raise Unsupported(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
        return allowed[value]

    def only(self, name: str, allowed: object, reason: str) -> None:
        """Refuses (Unsupported) any other value of a field that may be absent."""
        value = self._config.get(name)
        if value is not None and value != allowed:
            raise Unsupported(f"{name} is {value!r}; allowed: {allowed!r} ({reason})")

    def layer_types(self, name: str, num_layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
        """A required list of one known word per layer."""
        value = self._required(name, (list, tuple), "a list of one word per layer")
        if len(value) != num_layers:
            raise ConfigError(f"{name} has {len(value)} entries; num_hidden_layers is {num_layers}")
        for layer, word in enumerate(value):
            if word not in known:
                raise Unsupported(f"{name}[{layer}] is {word!r}; allowed: {', '.join(known)}")
        return tuple(value)

    def swiglu_limit(self) -> float | None:
        """Required: a model that was trained with the clamp is another model without it."""
        return checked_swiglu_limit(self.number("swiglu_limit"))

    def check_router_dtype(self, numerics: Numerics) -> None:
        """A bf16 router selects other experts, so it runs only when the caller asks for it."""
        value = self._config.get("moe_router_dtype")
        if value in (None, "float32") or (value == "bfloat16" and numerics.router == "bf16_ladder"):
            return
        raise Unsupported(
            f"moe_router_dtype is {value!r}; allowed: 'float32', or 'bfloat16' together with "
            "numerics router='bf16_ladder', which selects it"
        )
