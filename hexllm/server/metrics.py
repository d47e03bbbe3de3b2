"""Prometheus metrics, by vLLM's names where it has one, so that its dashboards work."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from hexllm.engine.client import EngineClient
    from hexllm.engine.messages import StepSeconds
    from hexllm.server.admission import Admission

_LABELS = ("model_name", "engine")
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_STEP = tuple(m * 10**e for e in range(-4, 2) for m in (1, 2.5, 5))
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class ServerMetrics:
    """What one server counts.

    The counters are plain numbers, read when Prometheus asks: a generated token costs an addition.

    Attributes:
        requests_in_flight: HTTP requests that are generating now.
        prompt_tokens: Prompt tokens of sequences that gave a first token.
        cached_tokens: Of those, how many came from the prefix cache.
        generation_tokens: Tokens generated.
        requests_timed_out: HTTP requests that reached their deadline.
    """

    def __init__(self, client: EngineClient, admission: Admission, model_name: str) -> None:
        self.requests_in_flight = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.requests_timed_out = 0
        self._finished: Counts[str] = Counts()
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._registry.register(_Snapshot(self, client, admission))
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one sequence.",
            _BETWEEN_TOKENS,
        )  # fmt: skip
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end of a request.", _REQUEST
        )
        self.request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished sequence.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a finished sequence.", _TOKENS
        )
        steps = Histogram(
            "hexllm:step_seconds",
            "Time of the engine's steps: the host's own work, and waiting for the device.",
            (*_LABELS, "share"),
            registry=self._registry,
            buckets=_STEP,
        )
        self._host_share = steps.labels(*self._labels, "host")
        self._device_share = steps.labels(*self._labels, "device")

    def observe_steps(self, steps: tuple[StepSeconds, ...]) -> None:
        """Count steps of the engine that ended."""
        for step in steps:
            self._host_share.observe(step.host)
            self._device_share.observe(step.device)

    def count_finished(self, reason: str) -> None:
        """Count one sequence's end: ``stop``, ``length``, ``abort`` or ``error``."""
        self._finished[reason] += 1

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._labels)


class _Snapshot(Collector):
    """Reads the plain counters, and the engine's, at the moment of a scrape."""

    def __init__(self, metrics: ServerMetrics, client: EngineClient, admission: Admission) -> None:
        self._metrics = metrics
        self._client = client
        self._admission = admission

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are this module's own and cannot clash."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics as they are now."""
        metrics, stats = self._metrics, self._client.stats
        used = stats.num_blocks - stats.num_free_blocks
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that hold KV blocks.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that hold none yet.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
             used / stats.num_blocks if stats.num_blocks else 0.0),
            ("hexllm:requests_in_flight", "HTTP requests generating.", metrics.requests_in_flight),
            ("hexllm:engine_silence_seconds",
             "Since the engine's last sign of life while it owes an answer.", self._client.silence),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(metrics._labels, value)
            yield gauge
        for name, text, value in (
            ("vllm:num_preemptions", "Sequences that lost their blocks.", stats.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens processed.", metrics.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", metrics.generation_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", metrics.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens from the cache.", metrics.cached_tokens),
            ("hexllm:engine_steps", "Steps of the engine.", stats.num_steps),
            ("hexllm:engine_step_seconds", "Seconds spent in steps.", stats.step_seconds),
            ("hexllm:late_compiles", "Programs compiled after warm-up.", stats.num_late_compiles),
            ("hexllm:requests_refused", "Requests answered 429, the queue being full.",
             self._admission.num_refused),
            ("hexllm:requests_timed_out", "Requests that reached their deadline.",
             metrics.requests_timed_out),
        ):  # fmt: skip
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(metrics._labels, value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended.", labels=(*_LABELS, "finished_reason")
        )
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric((*metrics._labels, reason), metrics._finished[reason])
        yield finished


router = APIRouter()


@router.get("/metrics", summary="Prometheus metrics")
async def metrics_route(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    metrics: ServerMetrics = request.app.state.server.metrics
    return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
