"""`model.generate(..., custom_generate=lp.generate)`: lookahead behind transformers' own entry point."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from lp.config import LookaheadConfig
from lp.decoding.lookahead import LookaheadDecoder


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    window_size: int = 15,
    ngram_size: int = 5,
    guess_set_size: int = 15,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Greedy lookahead decoding for transformers' `generate`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: as transformers hands them over.
        window_size, ngram_size, guess_set_size: W, N, G, given to `model.generate` by keyword.

    Returns:
        What `generate` would: LongTensor (1, L + new), or GenerateDecoderOnlyOutput if return_dict_in_generate.

    Raises:
        ValueError: what this decoder can't do exactly: sampling, beams, processors, batches, padding, use_cache=False.
    """
    config = generation_config or model.generation_config
    # Declared, transformers would hand attention_mask over twice.
    _check_asked(config, input_ids, logits_processor, model_kwargs.get("attention_mask"))
    shape = LookaheadConfig(window_size=window_size, ngram_size=ngram_size, guess_set_size=guess_set_size)
    criteria = [c for c in stopping_criteria or () if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    eos = getattr(config, "_eos_token_tensor", None)
    output = LookaheadDecoder(model, shape).generate(
        input_ids,
        max_new_tokens=config.max_length - input_ids.shape[1],
        eos_token_id=() if eos is None else eos.flatten().tolist(),
        stopping_criteria=criteria,
    )
    sequences = torch.cat([input_ids, input_ids.new_tensor([output.tokens])], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _check_asked(
    config: GenerationConfig,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList | None,
    attention_mask: torch.Tensor | None,
) -> None:
    asked = {
        "do_sample=True": bool(config.do_sample),
        f"num_beams={config.num_beams}": (config.num_beams or 1) > 1,
        f"num_return_sequences={config.num_return_sequences}": (config.num_return_sequences or 1) > 1,
        "use_cache=False": config.use_cache is False,
        f"a batch of {len(input_ids)}": len(input_ids) > 1,
        "padding in attention_mask": attention_mask is not None and not bool(attention_mask.all()),
        "output_scores or output_logits": bool(config.output_scores or config.output_logits),
    }
    asked |= {f"the logits processor {type(p).__name__}": True for p in processors or ()}
    refused = [name for name, wanted in asked.items() if wanted]
    if refused:
        raise ValueError(f"lp.generate does not do {', '.join(refused)}; ask for greedy decoding of one unpadded prompt")
