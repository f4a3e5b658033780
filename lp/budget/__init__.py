"""The token budget: how long a step takes by its tokens, and how many columns and draft tokens the next step gets."""
