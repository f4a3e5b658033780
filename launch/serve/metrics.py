"""Counts for /metrics, in Prometheus' text format; counts that routers and dashboards read have vLLM's names, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from .acceptance import acceptance, draft_tokens
from .engine_loop import Ending, EngineLoop

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
VLLM = "vllm:"
DRAFTED = f"{VLLM}spec_decode_num_"


class Metrics:
    """Counts a server's requests, texts and tokens, and reports them in Prometheus' text format for /metrics.

    Args:
        loop: the engine's loop, from which each report reads how many texts run and wait, and how full the KV cache is.
    """

    def __init__(self, loop: EngineLoop) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_State(loop))

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        self._requests = counter("lp_requests", "HTTP requests by path and status", "path", "status")
        self._prompt_tokens = counter("lp_prompt_tokens", "tokens of prompts that were cached anew")
        self._cached_tokens = counter("lp_cached_prompt_tokens", "tokens of prompts that were cached before")
        self._tokens = counter("lp_generated_tokens", "generated tokens")
        self._steps = counter("lp_steps", "decode steps of all texts; generated tokens by steps is S")
        self._drafts = counter("lp_draft_tokens", "draft tokens")
        self._accepted = counter("lp_accepted_tokens", "accepted draft tokens")
        self._drafted = {
            "num_spec_steps": counter(f"{DRAFTED}drafts", "steps that had draft tokens"),
            "num_draft_tokens": counter(f"{DRAFTED}draft_tokens", "draft tokens"),
            "num_accepted_draft_tokens": counter(f"{DRAFTED}accepted_tokens", "accepted draft tokens"),
        }
        self._ended = counter("lp_texts", "texts by how they ended", "reason")
        self._first = Histogram("lp_time_to_first_token_seconds", "", buckets=SECONDS, registry=registry)
        self._token = Histogram("lp_time_per_token_seconds", "", buckets=TOKEN_SECONDS, registry=registry)

    def request(self, path: str, status: int) -> None:
        """Count one HTTP response.

        Args:
            path: path of the endpoint's route, such as "/v1/completions"; "other" if no route matches the request.
            status: HTTP status of the response.
        """
        self._requests.labels(path, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Record a time to first token.

        Args:
            seconds: time from the request to the first token of its text.
        """
        self._first.observe(seconds)

    def ended(self, ending: Ending) -> None:
        """Count a text that has ended: its reason, its tokens and decode steps, and its time per token.

        Args:
            ending: the text's last event, which has these counts.
        """
        self._ended.labels("failed" if ending.error else ending.reason).inc()
        self._tokens.inc(ending.generated)
        if ending.steps:  # else it has waited, and its client has left
            self._prompt_tokens.inc(ending.prompt_tokens - ending.cached)
        self._cached_tokens.inc(ending.cached)
        self._steps.inc(len(ending.steps))
        self._drafts.inc(draft_tokens(ending.steps))
        self._accepted.inc(sum(step.accepted for step in ending.steps))
        found = acceptance(ending.steps)
        for name, drafted in self._drafted.items():
            drafted.inc(found[name])
        if ending.generated:
            self._token.observe(ending.decode_s / ending.generated)

    def text(self) -> bytes:
        """All counts in Prometheus' text format: the body of a response of /metrics."""
        return generate_latest(self._registry)


class _State:
    """What is so when it is looked at."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Any]:
        loop, engine = self._loop, self._loop.engine
        running = engine.running
        waiting = max(loop.texts - running, 0)
        pool = engine.pool
        used = 1 - engine.available_slots / pool.capacity  # what is kept for reuse is no load
        yield GaugeMetricFamily("lp_texts_running", "texts that take steps", running)
        yield GaugeMetricFamily("lp_texts_waiting", "texts that wait", waiting)
        yield GaugeMetricFamily("lp_cache_slots", "cache slots of all texts", pool.capacity)
        yield GaugeMetricFamily("lp_cache_slots_free", "those that no text has", pool.free)
        yield GaugeMetricFamily(f"{VLLM}num_requests_running", "texts that take steps", running)
        yield GaugeMetricFamily(f"{VLLM}num_requests_waiting", "texts that wait", waiting)
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # llm-d reads the first, vLLM's stack the second
            yield GaugeMetricFamily(f"{VLLM}{name}", "share of the cache slots that texts have, 0 to 1", used)
