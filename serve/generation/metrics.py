"""Prometheus metrics: vLLM's names under our prefix, plus loop counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from loopwm.core.kv_cache import allocated_bytes
from serve.engine.prefix_cache import PrefixCache
from serve.engine.requests import Event, Finish
from serve.generation.rate_limits import RATES, Rate

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

PREFIX = "loopwm:"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
LOOPS = tuple(range(1, 17))

Used = Mapping[tuple[str, Rate], int]


class Totals(Collector):
    """Counters that are kept elsewhere: of prompt tokens in the prefix cache, and of what each key used."""

    def __init__(self, model: str, cache: PrefixCache, used: Used) -> None:
        """Read from a cache, and from amounts by key and rate."""
        self._model, self._cache, self._used = model, cache, used

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, tokens in (("queries", self._cache.queried), ("hits", self._cache.hit)):
            text = f"Prompt tokens in the prefix cache, {name}."
            yield self._counter(f"prefix_cache_{name}", text, [([], tokens)])
        for rate in RATES:
            used = [([key], amount) for (key, of), amount in sorted(self._used.items()) if of == rate]
            yield self._counter(f"key_{rate}", f"{rate.capitalize()} charged to a key.", used, "key")

    def _counter(
        self, name: str, text: str, values: Sequence[tuple[list[str], int]], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
        for of, value in values:
            family.add_metric([self._model, *of], value)
        return family


class Metrics:
    def __init__(self, model: str, load: Callable[[], tuple[int, int]], cache: PrefixCache, used: Used) -> None:
        """Create a registry of its own. load: returns the numbers of running and of waiting requests."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._model = model
        self._gauge("num_requests_running", "Requests that decode.", lambda: load()[0])
        self._gauge("num_requests_waiting", "Requests and other work items that wait.", lambda: load()[1])
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        success = self._metric(Counter, "request_success", "Completed requests by finish reason.", "finished_reason")
        self.success = {reason: success.labels(model, str(reason)) for reason in Finish}
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from the request to its first token.", SECONDS
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Time in the queue before the prompt.", SECONDS)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "Time between two tokens.", SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "Time from the request to its end.", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.length = self._histogram("request_generation_tokens", "Tokens generated for a request.", TOKENS)
        self.loops = self._histogram("loops_per_token", "Loops of a generated token.", LOOPS)

        text = "Responses by route and status; 499 if the client disconnected first."
        self._requests = self._metric(Counter, "http_requests", text, "method", "route", "status")
        text = "Time from a request to the end of its response."
        name = "http_request_duration_seconds"
        self._seconds = self._metric(Histogram, name, text, "method", "route", buckets=SECONDS)
        text = "Generations by outcome: a finish reason, error or cancelled."
        self._outcomes = self._metric(Counter, "request_outcome", text, "outcome")
        self._registry.register(Totals(model, cache, used))

    def record_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record a response of the HTTP layer. route: path pattern."""
        self._requests.labels(self._model, method, route, status).inc()
        self._seconds.labels(self._model, method, route).observe(seconds)

    def record_token(self, seconds: float, event: Event, prompt_tokens: int) -> None:
        """Record a decode step.

        seconds: since the step before, or since the request's arrival.
        prompt_tokens: of the request at its first step, else 0.
        """
        self.prompt_tokens.inc(prompt_tokens)
        (self.first_token if prompt_tokens else self.between_tokens).observe(seconds)
        if event.token is not None:
            self.generation_tokens.inc()
        self.loops.observe(event.loops)

    def record_end(self, finish: Finish, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """Record a completed request and its seconds since arrival."""
        self.success[finish].inc()
        self.record_outcome(str(finish))
        self.latency.observe(seconds)
        self.prompt_length.observe(prompt_tokens)
        self.length.observe(tokens)

    def record_outcome(self, outcome: str) -> None:
        self._outcomes.labels(self._model, outcome).inc()

    def watch_worlds(self, count: Callable[[], int]) -> None:
        """Add gauges of world sessions and KV-cache memory. Call once."""
        self._gauge("num_worlds", "Open world sessions.", count)
        self._gauge("kv_cache_bytes", "Memory of all KV caches, running and cached.", allocated_bytes)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _metric(self, kind: type[Metric], name: str, text: str, *labels: str, **options: Any) -> Metric:
        return kind(PREFIX + name, text, ["model_name", *labels], registry=self._registry, **options)

    def _gauge(self, name: str, text: str, value: Callable[[], int]) -> None:
        self._metric(Gauge, name, text).labels(self._model).set_function(value)

    def _counter(self, name: str, text: str) -> Counter:
        return self._metric(Counter, name, text).labels(self._model)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return self._metric(Histogram, name, text, buckets=bounds).labels(self._model)
