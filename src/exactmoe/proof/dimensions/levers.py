"""Levers: switches of env.py that choose another way through the same arithmetic."""

from exactmoe import env
from exactmoe.proof.backends import gpu_order
from exactmoe.proof.trial import Trial

# Switches, and settings that are not the default.
SETTINGS = (
    ("EXACTMOE_SHARED_STREAM", "off"),
    ("EXACTMOE_UNION", "off"),
    ("EXACTMOE_HOST_LOOP", "on"),
    ("EXACTMOE_EARLY", "off"),
    ("EXACTMOE_GATE_UP", "two"),
    ("EXACTMOE_EXPERTS", "one"),
    ("EXACTMOE_EXPERTS", "two"),
)
# Those that only the kernels of one backend read.
OF_BACKEND = {"EXACTMOE_GATE_UP": "triton", "EXACTMOE_EXPERTS": "cuda"}
_STREAM = 150
_WIDTHS = (1, 8, 65)


def levers(trial: Trial) -> None:
    """Each switch away from its default, by itself."""
    layer = trial.entry.layer
    if not gpu_order(layer):
        trial.cannot_run("levers", "the CPU's backends have none")
        return
    for tokens in _WIDTHS:
        batch = trial.random(tokens, _STREAM)
        expected = trial.run(batch)
        for switch, setting in SETTINGS:
            backend = layer.plan().backend
            if OF_BACKEND.get(switch, backend) != backend:
                continue  # the same call twice
            with env.forced(switch, setting):
                trial.compare("levers", f"{switch}={setting}", expected, trial.run(batch))
