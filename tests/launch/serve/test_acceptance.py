"""Acceptance of draft tokens in answers, under vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest

from launch.serve.acceptance import acceptance
from lp.engine.output import StepStats
from tests.support.serving import Running

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

ASKED: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
NAMES = (
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
)  # fmt: skip


def step(num_draft: int, accepted: int) -> StepStats:
    return StepStats(20, num_draft, accepted, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([], (1.0, 0.0, [0], 0, 0, 0)),
        ([step(0, 0)], (1.0, 0.0, [0], 0, 0, 0)),  # a plain step is none of vLLM's drafts
        ([step(6, 3), step(4, 0), step(0, 0), step(6, 1)], (1 + 4 / 3, 0.25, [1, 1, 0, 1], 3, 4, 16)),
        ([step(0, 2), step(1, 0)], (2.0, 2 / 3, [1, 0, 1], 2, 2, 3)),  # the window's tokens were accepted
    ],
)
def test_the_fields_agree_with_each_other(steps: list[StepStats], expected: tuple[Any, ...]) -> None:
    """As load tools check: a histogram of all steps, and no more accepted than drafted."""
    assert tuple(acceptance(steps).items()) == (*zip(NAMES[:-1], expected, strict=True), ("num_spec_tokens", None))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, given",
    [
        ("/v1/completions", {"prompt": "import os\n"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_an_answer_has_them_beside_its_usage(
    demo_server: Running, path: str, given: dict[str, Any], stream: bool
) -> None:
    """In a stream the event with the usage has them; an answer of several texts has none, as of vLLM."""
    client = demo_server.openai()
    asked: dict[str, Any] = {"model": "demo", **given, **ASKED, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}

    def last(**more: Any) -> dict[str, Any]:
        make = client.completions.create if path == "/v1/completions" else client.chat.completions.create
        answer = make(**asked, **more)
        found: dict[str, Any] = [*answer][-1].to_dict() if stream else answer.to_dict()
        return found

    whole = last()
    found, usage = whole["metrics"]["speculative_decoding"], whole["usage"]
    assert tuple(found) == NAMES
    assert found["num_accepted_draft_tokens"] == usage["accepted_draft_tokens"] > 0
    assert (
        found["num_draft_tokens"] == usage["draft_tokens"] >= usage["accepted_draft_tokens"] > 0
        and 0 < found["num_spec_steps"] <= usage["steps"]
    )
    assert last(n=2)["metrics"] == {"speculative_decoding": None}
