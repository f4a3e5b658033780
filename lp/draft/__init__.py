"""Draft tokens: where a step's draft tree comes from, how ranks divide it, and how it is verified.

Nothing here imports transformers or torch.distributed.

Importing this package registers the built-in draft sources; see `lp.draft.registry`.
"""

from lp.draft import jacobi, paper, prompt_lookup, suffix, token_recycling
from lp.draft.pool import factory

__all__ = ["factory", "jacobi", "paper", "prompt_lookup", "suffix", "token_recycling"]
