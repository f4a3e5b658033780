"""The mode `exact="bitwise"`: lookahead gives the logits of plain decoding bit for bit, in every dtype.

A token's logits follow from the KV of the tokens before it and from the token itself. If that KV is
bit-identical to plain decoding's, so are the token's logits and its own KV, provided that

1. a row, which is the hidden state of one token, gets the same bits in every forward pass. So passes are padded to
   numbers of tokens (widths) at which this very model was found to give the same bits, with the number of threads that
   it runs with (`lp.models.equal_widths`). The inputs of experts are padded likewise (`lp.models.experts_by_row`);
2. attention sums over the keys in an order that depends on their positions alone, not on their cache slots or on the
   other sequences in the pass (`lp.attention.by_position`);
3. ranks that divide a model between them sum their partial results in rank order (`lp.parallel.replica.InRankOrder`).

The first token of a prompt has no KV before it. So by induction every prompt token and every accepted token has the KV
that plain decoding in this mode gives it. This holds with any W, N and G (the sizes of lookahead's window, n-grams and
guess sets), on any number of ranks that share steps, alone or in a batch, and after a reused prefix.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from lp.attention.registry import AUTO
from lp.config import Capture, Exact, KVDtype
from lp.errors import UserError
from lp.models.equal_widths import equal_widths
from lp.models.experts_by_row import experts_obstacle, pad_experts
from lp.models.model_lock import lock_of
from lp.models.quantisation import tokens_share_scales
from lp.models.runner import ModelRunner, runner_of
from lp.models.sharded_layers import replica_of
from lp.waits import waiting

BACKEND = "by_position"
REMEDY = "choose exact=tokens"


def runner_for(
    model: PreTrainedModel, attention: str, capture: str, exact: str, kv_dtype: str = KVDtype.AUTO
) -> ModelRunner:
    """Get the model's runner for a decoder's settings, among them `exact="bitwise"`; equal settings share one runner.

    Args:
        model: the causal LM.
        attention: "auto", or the name of an attention backend.
        capture: whether and how decode steps are captured, which means recorded once and then replayed.
        exact: "tokens" for plain decoding's tokens up to rounding, "bitwise" for its logits bit for bit; "auto" is
            "tokens".
        kv_dtype: dtype in which caches store keys and values: "int8", "fp8", or "auto" for the model's own.

    Raises:
        ValueError: a value is unknown, `runner_of` refuses the model, or "bitwise" is impossible with this model or
            with another setting; names the cause and, for "bitwise", the remedy.
    """
    if exact not in list(Exact):
        raise UserError(f"exact is {exact!r}; it must be one of {', '.join(Exact)}")
    if capture not in list(Capture):
        raise UserError(f"capture is {capture!r}; it must be one of {', '.join(Capture)}")
    capture = Capture(capture)
    if exact != Exact.BITWISE:
        return runner_of(model, attention, capture, kv_dtype=KVDtype.of(kv_dtype))
    if obstacle := _obstacle(model, attention, capture):
        raise UserError(f"exact is 'bitwise', but {obstacle}; {REMEDY}")
    runner = runner_of(model, BACKEND, capture, Exact.BITWISE, KVDtype.of(kv_dtype))
    if runner.recurrent or runner.boundary:
        what = "layers that keep a recurrent state" if runner.recurrent else "rotary frequencies that change"
        raise UserError(f"exact is 'bitwise', but {type(model).__name__} has {what}; {REMEDY}")
    with lock_of(model), waiting("asking the model which passes give the same bits"):
        runner.keep_widths(_ask_widths)
    return runner


def check_step_tokens(runner: ModelRunner, num_tokens: int) -> None:
    """Refuse a config whose decode steps have more tokens than a pass may have in `exact="bitwise"`.

    Args:
        runner: the decoder's runner; its largest width (number of tokens that passes are padded to) is the limit. A
            runner without widths has no limit.
        num_tokens: tokens of the config's largest step.

    Raises:
        ValueError: the step is too large; names both numbers.
    """
    if runner.widths and num_tokens > runner.widths[-1]:
        raise UserError(
            f"exact is 'bitwise', whose passes have up to {runner.widths[-1]} tokens here, and a step of this config "
            f"has {num_tokens}; lower W, N or G, or {REMEDY}"
        )


def _obstacle(model: PreTrainedModel, attention: str, capture: Capture) -> str | None:
    """What the mode can't be had with; None: nothing that is known before the model is asked."""
    if attention not in (AUTO, BACKEND):
        return f"attention is {attention!r}, which adds up in another order for other steps"
    if capture == Capture.COMPILE:
        return "capture is 'compile', whose kernels round otherwise than those of a prompt's passes"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model lies on more than one device"
    if replica_of(model).size > 1 and model.device.type != "cpu":
        return f"the model is divided among ranks (parallel.tp) on {model.device.type!r}, where this has not been tried"
    if reason := tokens_share_scales(model):
        return reason
    return experts_obstacle(model)


def _ask_widths(runner: ModelRunner) -> tuple[int, ...]:
    """The model's equal widths, to which its experts are padded from now on."""
    widths = equal_widths(runner)
    pad_experts(runner.model, widths)
    return widths
