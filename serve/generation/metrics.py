"""What Prometheus is told: vLLM's metrics under our prefix, and the loops behind tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.engine.requests import Event, Finish

PREFIX = "loopwm:"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
LOOPS = tuple(range(1, 17))


class Metrics:
    """The counts of one service. load: rows decoding now and requests waiting."""

    def __init__(self, model: str, load: Callable[[], tuple[int, int]]) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._gauge("num_requests_running", "Rows that decode now.", lambda: load()[0])
        self._gauge("num_requests_waiting", "Requests and other work that wait.", lambda: load()[1])
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were begun.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        success = Counter(
            PREFIX + "request_success", "Requests that came to their end.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self.success = {reason: success.labels(model, str(reason)) for reason in Finish}
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", SECONDS
        )
        self.between_tokens = self._histogram("inter_token_latency_seconds", "From a token to the next.", SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "From the request to its end.", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.length = self._histogram("request_generation_tokens", "Tokens generated for a request.", TOKENS)
        self.loops = self._histogram("loops_per_token", "Loops behind a generated token.", LOOPS)

        self._requests = Counter(
            PREFIX + "http_requests", "Answers by route and status; 499 where the client left before.",
            ["model_name", "method", "route", "status"], registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            PREFIX + "http_request_duration_seconds", "From a request to the end of its answer.",
            ["model_name", "method", "route"], registry=self._registry, buckets=SECONDS,
        )  # fmt: skip
        self._outcomes = Counter(
            PREFIX + "request_outcome", "Generations by how they ended: a finish reason, error or cancelled.",
            ["model_name", "outcome"], registry=self._registry,
        )  # fmt: skip

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer of the HTTP layer. route: its pattern."""
        self._requests.labels(self._model, method, route, status).inc()
        self._seconds.labels(self._model, method, route).observe(seconds)

    def ended(self, outcome: str) -> None:
        self._outcomes.labels(self._model, outcome).inc()

    def watch(self, prompt_tokens: int) -> Meter:
        return Meter(self, prompt_tokens)

    def watch_worlds(self, count: Callable[[], int], nbytes: Callable[[], int]) -> None:
        """Tells of kept worlds and of memory, too. Call it once."""
        self._gauge("num_worlds", "Worlds that are kept.", count)
        self._gauge("kv_cache_bytes", "Keys and values of all that runs and is kept.", nbytes)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, told: str, value: Callable[[], int]) -> None:
        gauge = Gauge(PREFIX + name, told, ["model_name"], registry=self._registry)
        gauge.labels(self._model).set_function(value)

    def _counter(self, name: str, told: str) -> Counter:
        return Counter(PREFIX + name, told, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, told: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, told, ["model_name"], registry=self._registry, buckets=bounds)
        return made.labels(self._model)


class Meter:
    """One request on its way. `hear` is called by the engine's thread, `end` by the reader when all went well."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._begun = self._last = time.perf_counter()
        self._heard = 0

    def hear(self, event: Event) -> None:
        if event.error is not None:
            return
        now, metrics = time.perf_counter(), self._metrics
        if self._heard == 0:
            metrics.prompt_tokens.inc(self._prompt_tokens)
        (metrics.between_tokens if self._heard else metrics.first_token).observe(now - self._last)
        if event.token is not None:
            metrics.generation_tokens.inc()
        metrics.loops.observe(event.loops)
        self._last, self._heard = now, self._heard + 1

    def end(self, finish: Finish, tokens: int) -> None:
        metrics = self._metrics
        metrics.success[finish].inc()
        metrics.ended(str(finish))
        metrics.latency.observe(time.perf_counter() - self._begun)
        metrics.prompt_length.observe(self._prompt_tokens)
        metrics.length.observe(tokens)

    def fail(self, outcome: str) -> None:
        """It did not come to its end."""
        self._metrics.ended(outcome)
