"""A tiny model in a folder, and the apps started inside this process."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lp
from lp.models.loader import DEMO_MODEL
from tests.support.tiny_models import tiny_model

if TYPE_CHECKING:
    from tests.support.serving import Running
    from tests.support.simulated_cuda import SimulatedCuda

CONTEXT = 256


@pytest.fixture
def gpu() -> Iterator[SimulatedCuda]:
    """A simulated CUDA device: "cuda" may be used within the test, and what is asked of it is counted."""
    from tests.support.simulated_cuda import simulated_cuda, why_not  # here: most tests need none

    if reason := why_not():
        pytest.skip(reason)
    with simulated_cuda() as simulated:
        yield simulated


def save_tiny_model(folder: Path, vocab_size: int | None = None, context: int = CONTEXT) -> Path:
    """A random Llama with the demo model's tokenizer; it has no EOS token, so what is drawn never ends early."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.1,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_settings(folder: Path) -> list[str]:
    """Overrides for short runs of an app with the model of `save_tiny_model`: two prompts of 12 new tokens."""
    return ["model=hf", f"model.name={folder}", "model.dtype=float64", "N=3", "G=4", "limit=2", "max_new_tokens=12"]


def with_template(source: Path, folder: Path, template: str) -> Path:
    """A copy of a model's folder with a chat template."""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model() -> PreTrainedModel:
    """A random Llama in float64, which pads a batch with token 0."""
    model = tiny_model()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Running]:
    """A server of the demo model, for tests that leave it as it was."""
    for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(package, reason="the extra `serve` is not installed")
    from tests.support.serving import serving

    with serving(*lp.load("demo")) as running:
        yield running


@pytest.fixture(scope="session")
def infill_server() -> Iterator[Running]:
    """A server of a random model with Qwen2.5-Coder's special tokens, for tests that leave it as it was."""
    for package in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(package, reason="the extra `serve` is not installed")
    from tests.support.fim_models import infilling_model
    from tests.support.serving import serving

    with serving(*infilling_model()) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@dataclass
class Ran:
    """How an app ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def start_app(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run an app in this process, since a start of its own costs seconds."""
    import launch.running.hydra_app

    def start(task: Callable[..., None], config_name: str, *overrides: str) -> Ran:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        monkeypatch.setattr(sys, "argv", ["app", *overrides])
        capfd.readouterr()
        code = 0
        try:
            launch.running.hydra_app.run(task, config_name)
        except SystemExit as end:
            code = int(end.code or 0)
        return Ran(code, *capfd.readouterr())

    return start


@pytest.fixture
def launch_generate(start_app: Callable[..., Ran]) -> Callable[..., Ran]:
    """`python -m launch.generate` with these overrides; the prompts are short ones, which fit the tiny model."""
    import launch.generate

    def start(*overrides: str) -> Ran:
        task = [] if any(override.startswith("task=") for override in overrides) else ["task=builtin"]
        # Overrides lie side by side, or Hydra's argparse does not see the second part of them.
        overrides = (*overrides, *task) if overrides and overrides[0].startswith("-") else (*task, *overrides)
        return start_app(launch.generate.generate, "generate", *overrides)

    return start


@pytest.fixture
def launch_chat(start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """`python -m launch.chat` with these lines in the pipe, and these overrides."""
    import launch.chat

    def start(lines: str, *overrides: str) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return start_app(launch.chat.chat, "chat", *overrides)

    return start


@pytest.fixture
def launch_profile(
    start_app: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Ran]:
    """`python -m launch.profile` with these overrides, in a folder of its own."""
    import launch.profile

    monkeypatch.chdir(tmp_path)
    return partial(start_app, launch.profile.profile_model, "profile")


@pytest.fixture
def wrong_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: prompt lookup says another token at new token 5."""
    honest = lp.LookaheadDecoder.generate

    def wrong(self: lp.LookaheadDecoder, *args: object, **options: object) -> lp.GenerationOutput:
        output = honest(self, *args, **options)  # type: ignore[arg-type]
        if isinstance(self.settings, lp.PromptLookupConfig):
            output.tokens[5] += 1
        return output

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", wrong)


@pytest.fixture
def wrong_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: plain decoding on our engine says another token at new token 5."""
    honest = lp.PlainDecoder.generate

    def wrong(self: lp.PlainDecoder, *args: object, **options: object) -> lp.GenerationOutput:
        output = honest(self, *args, **options)  # type: ignore[arg-type]
        if len(output.tokens) > 5:  # else it only warms up
            output.tokens[5] += 1
        return output

    monkeypatch.setattr(lp.PlainDecoder, "generate", wrong)
