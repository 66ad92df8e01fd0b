"""Prometheus metrics of a server, in a registry of their own."""

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """What is counted. Outcomes: stop, length, cancelled, timeout, shutdown, error."""

    def __init__(self, facts: dict[str, str]) -> None:
        """facts: of the model and the machine, shown as labels of exactmoe_server_info."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("exactmoe_server", "What runs here.", registry=registry).info(facts)
        self.requests = Counter(
            "exactmoe_requests",
            "Requests that were taken, by how they ended.",
            ["outcome"],
            registry=registry,
        )
        self.refused = Counter(
            "exactmoe_refused", "Requests that were refused.", ["status"], registry=registry
        )
        self.prompt_tokens = Counter(
            "exactmoe_prompt_tokens", "Tokens of prompts that were started.", registry=registry
        )
        self.new_tokens = Counter(
            "exactmoe_new_tokens", "Tokens that were generated.", registry=registry
        )
        self.wait = Histogram(
            "exactmoe_wait_seconds",
            "From arrival to start.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "exactmoe_first_token_seconds",
            "From start to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "exactmoe_seconds_per_token",
            "Of an answer, after its first token.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "exactmoe_request_seconds",
            "From arrival to end.",
            buckets=_SECONDS,
            registry=registry,
        )

    def watch(self, running: Callable[[], int], waiting: Callable[[], int], queue: int) -> None:
        """Gauges that are read when somebody asks."""
        gauges = (
            ("exactmoe_running", "Requests that run now: 0 or 1.", running),
            ("exactmoe_waiting", "Requests that wait.", waiting),
            ("exactmoe_queue_limit", "Requests that may wait.", lambda: queue),
        )
        for name, meaning, read in gauges:
            Gauge(name, meaning, registry=self.registry).set_function(read)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
