"""Baselines by llama.cpp, through llama-cpp-python: plain decoding, and the package's own prompt lookup.

llama.cpp reads the model from a GGUF file, runs on as many threads as torch has, and caches keys and values in the
model's dtype. The prompt without its last token is prefilled before decoding is timed, as in lp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lp.commands import install_command, module_command
from lp.engine.decoder import Decoder
from lp.engine.output import GenerationOutput, StepStats, StepTimer
from lp.engine.request import Request
from lp.engine.stopping import FINISH_REASON
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from lp.optional import is_installed
from lp.parallel.context import ParallelContext
from lp.parallel.message import Stop
from lp.sampling.generation_config import NONE

from .registry import BaselineOptions, register_baseline

GGML_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


def missing(options: BaselineOptions) -> str | None:
    """Reason why llama.cpp cannot run here, with the remedy; None if it can run.

    It needs llama-cpp-python, the model as a GGUF file, and greedy decoding. When llama.cpp samples, its random numbers
    differ from lp's, so sampled texts would not be comparable.
    """
    if not is_installed("llama_cpp"):
        return (
            f"needs the package llama-cpp-python; {install_command('llama-cpp')}, which compiles it: "
            "a C++ compiler, cmake and some ten minutes"
        )
    if options.gguf is None:
        return (
            f"needs the model as a GGUF file; give gguf=FILE ({module_command('bench.to_gguf')} MODEL FILE makes one)"
        )
    if not Path(options.gguf).is_file():
        return f"needs the model as a GGUF file, and gguf={options.gguf} is none; give the path of one"
    if not options.greedy:
        return "samples with noise of its own, so its text is another one; take sampling=greedy, or leave it out"
    return None


@register_baseline("llama_cpp", missing=missing)
def build_plain(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build the baseline llama_cpp: llama.cpp's plain decoding, one token per step.

    Raises:
        ValueError: llama.cpp cannot run here, for the reason that `missing` gives.
    """
    return LlamaCppDecoder(model, _gguf(options))


@register_baseline("llama_cpp_prompt_lookup", missing=missing)
def build_prompt_lookup(model: PreTrainedModel, context: ParallelContext, options: BaselineOptions) -> Decoder:
    """Build the baseline llama_cpp_prompt_lookup: llama.cpp with llama-cpp-python's prompt lookup.

    Raises:
        ValueError: llama.cpp cannot run here, for the reason that `missing` gives.
    """
    return LlamaCppDecoder(model, _gguf(options), prompt_lookup=options.num_tokens)


def _gguf(options: BaselineOptions) -> str:
    if lacking := missing(options):
        raise UserError(f"llama.cpp {lacking}")
    return str(options.gguf)


class LlamaCppDecoder(Decoder):
    """A decoder that runs llama.cpp, greedily, on this rank alone.

    Args:
        model: the model in torch, from which vocabulary size, dtype and device are taken.
        gguf: path of a GGUF file with the same model.
        prompt_lookup: most draft tokens that prompt lookup proposes per decode step; None: no prompt lookup.
    """

    follows = NONE  # a peer is measured on what was asked for

    def __init__(self, model: PreTrainedModel, gguf: str, *, prompt_lookup: int | None = None) -> None:
        super().__init__(model)
        self.gguf = gguf
        self.prompt_lookup = prompt_lookup
        self.num_threads = torch.get_num_threads()
        self._llama: Any = None  # llama_cpp.Llama, with a context as long as was needed so far

    @property
    def attention(self) -> str:
        """The attention backend's name in tables: always "llama.cpp's"."""
        return "llama.cpp's"

    def _decode(self, request: Request) -> GenerationOutput:
        if not request.sampler.is_argmax:
            raise UserError("llama.cpp samples with noise of its own; take greedy decoding")
        llama = self._with_context(len(request.prompt) + request.max_new_tokens)
        timer = StepTimer()
        llama.reset()
        if len(request.prompt) > 1:
            llama.eval(request.prompt[:-1])
        prefill_s = timer.restart()
        steps = _Steps(request, timer, self.prompt_lookup)
        llama.draft_model = steps if self.prompt_lookup else None
        for token in llama.generate(request.prompt[-1:], temp=0.0, repeat_penalty=1.0, reset=False):
            steps.add(token)
            if steps.reason:
                break
        decode_s = sum(step.forward_s for step in steps.stats)
        return GenerationOutput(
            steps.tokens[: steps.length], FINISH_REASON[steps.reason], steps.stats, prefill_s, decode_s
        )

    def _with_context(self, num_tokens: int) -> Any:
        """llama.cpp's model with a context of at least so many tokens, loaded again if the last one was shorter.

        Raises:
            UserError: the file cannot be read, or has another vocabulary.
        """
        if self._llama is not None and self._llama.n_ctx() >= num_tokens:
            return self._llama
        import llama_cpp

        dtype = GGML_DTYPES.get(self.model.dtype, GGML_DTYPES[torch.float32])
        self._llama = None  # before the next one takes its memory
        try:
            llama = llama_cpp.Llama(
                self.gguf,
                n_ctx=-(-num_tokens // 512) * 512,
                n_threads=self.num_threads,
                n_threads_batch=self.num_threads,
                n_gpu_layers=-1 if self.model.device.type == "cuda" else 0,
                # Every position's logits, which verification reads; the last one's for plain decoding.
                logits_all=self.prompt_lookup is not None,
                type_k=dtype,
                type_v=dtype,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(f"llama.cpp does not read gguf={self.gguf}: {error}; convert the model again") from error
        if llama.n_vocab() != vocabulary_size(self.model):
            raise UserError(
                f"gguf={self.gguf} has {llama.n_vocab()} tokens, the model {vocabulary_size(self.model)}; "
                "give the GGUF file of this very model"
            )
        self._llama = llama
        return llama


class _Steps:
    """Collects generated tokens by step, and drafts for llama-cpp-python, which calls it as draft model between steps.

    Args:
        request: decides where the text ends.
        timer: timer of the steps; the first step has begun with it.
        prompt_lookup: most draft tokens of a step; None drafts none, and every token is a step.
    """

    def __init__(self, request: Request, timer: StepTimer, prompt_lookup: int | None) -> None:
        self.request = request
        self.timer = timer
        self.draft: Any = None
        if prompt_lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self.draft = LlamaPromptLookupDecoding(num_pred_tokens=prompt_lookup)
        self.tokens: list[int] = []
        self.stats: list[StepStats] = []
        self.reason = Stop.NONE
        self.length = 0  # of the text
        self.ended = 0  # tokens of the steps that have ended
        self.num_tokens = 1  # of the current step

    def add(self, token: int) -> None:
        """Add a generated token; without drafts, and at the text's end, the step ends with it."""
        self.tokens.append(token)
        self.reason, self.length = self.request.stopping.check(self.tokens, 1)
        if not self.reason and self.request.signals.requested:
            self.reason = Stop.INTERRUPTED
        if self.reason or self.draft is None:
            self._end_step()

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """End the step and draft for the next one: from the text's token ids (L,), at most `prompt_lookup` ids."""
        self._end_step()
        drafted: np.ndarray = self.draft(input_ids)
        self.num_tokens = 1 + len(drafted)
        return drafted

    def _end_step(self) -> None:
        new = self.tokens[self.ended :]
        self.ended = len(self.tokens)
        if self.request.on_tokens:
            self.request.on_tokens(new, len(self.stats))
        seconds = self.timer.restart()
        self.stats.append(StepStats(self.num_tokens, self.num_tokens - 1, len(new) - 1, seconds, 0.0, 0.0))
