"""Run lm_eval's tasks with `lp batch` as the model: no server is started, and all requests of a task are one file.

    pip install 'lm_eval[api]'
    python -m lp.launch.batch.lm_eval --model lp-batch --tasks questions.yaml --model_args pretrained=FOLDER

The command is lm_eval's own, to which the model `lp-batch` is added (in a clone: `launch.batch.lm_eval`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI

import lp
from lp.errors import UserError

from ..config.arguments import quoted

ALL = sys.maxsize  # requests at a time


@register_model("lp-batch")
class BatchModel(LocalCompletionsAPI):
    """lm_eval's model `lp-batch`: makes the requests of lm_eval's `local-completions`, but answers them by `lp batch`.

    Args:
        pretrained: the model's folder or its name on the hub.
        dtype: dtype of the weights by name, such as "bfloat16".
        device: where the model computes, such as "cuda:1"; None takes lp's default, as does a GPU where torch has
            none: lm_eval says "cuda:0" where nobody has asked for a device.
        batch_size: ignored, as one file has all requests.
        max_batch_size: ignored.
        max_length: most tokens of a prompt and its answer together.
        overrides: further config keys of `lp batch`, such as max_sequences=16.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int = 2048,
        **overrides: Any,
    ) -> None:
        super().__init__(
            model=pretrained, tokenizer_backend="huggingface", batch_size=ALL, max_retries=1, max_length=max_length
        )
        given = {"model": "hf", "model.name": pretrained, "model.dtype": dtype, **overrides}
        if device and (torch.cuda.is_available() or not device.startswith("cuda")):
            given["model.device"] = device
        self._overrides = [
            f"{name}={quoted(value) if isinstance(value, str) else value}" for name, value in given.items()
        ]

    def model_call(
        self, messages: Any, *, generate: bool = True, gen_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Answer prompts by one run of `lp batch`; lm_eval calls this in place of sending an HTTP request.

        Args:
            messages: the prompts.
            generate: whether to generate text. False: the prompts' own tokens are scored.
            gen_kwargs: lm_eval's generation settings, such as {"max_gen_toks": 64}.
            kwargs: passed on to lm_eval's own code that makes the request's body.

        Returns:
            A body as /v1/completions returns it for several prompts: {"choices": [...]}, one choice for each prompt.

        Raises:
            ValueError: a request was refused; the message has the reason.
            RuntimeError: `lp batch` failed.
        """
        bodies = []
        for prompt in self.create_message(messages):
            own = dict(gen_kwargs or {})  # it is emptied
            body = self._create_payload(
                prompt, generate=generate, gen_kwargs=own, seed=self._seed, eos=self.eos_string, **kwargs
            )
            bodies.append({name: value for name, value in body.items() if name != "model"})
        return {
            "choices": [choice | {"index": index} for index, choice in enumerate(answered(bodies, self._overrides))]
        }


def answered(bodies: Sequence[dict[str, Any]], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Run `lp batch` on requests to /v1/completions, and return the first choice of each answer, in order.

    Args:
        bodies: bodies of the requests, each with one prompt.
        overrides: config overrides for `lp batch`, such as ["model=hf", "model.name=gpt2"].

    Raises:
        ValueError: a request was refused; the message has the reason.
        RuntimeError: `lp batch` failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        lines = (
            {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
            for index, body in enumerate(bodies)
        )
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = [sys.executable, "-m", lp.__name__, "batch", str(asked), str(answers), *overrides]
        code = subprocess.run(command, stdout=sys.stderr).returncode
        if code:
            raise RuntimeError(f"lp batch ended with the exit code {code}; its error is above")
        found: dict[int, dict[str, Any]] = {}
        for line in answers.read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)
            body = (answer["response"] or {"body": answer})["body"]  # a line that is no request has its own error
            if "choices" not in body:
                raise UserError(f"a request of lm_eval was refused: {body['error']['message']}")
            found[int(answer["custom_id"])] = body["choices"][0]
        return [found[index] for index in range(len(bodies))]


if __name__ == "__main__":
    cli_evaluate()
