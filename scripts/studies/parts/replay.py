"""Draft sources replayed against texts that a model wrote, without the model.

Decoding is exact, so a source that learns from the text alone takes the very steps of a run when it proposes draft
tokens behind each prefix of the known text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.errors import UserError
from lp.sampling.top_logits import TopLogits

from ..harness import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """How the model continued one prompt.

    Args:
        task: name of the set the prompt is from.
        index: the prompt's number in its set, which sampled noise depends on too.
        temperature: temperature that the text was sampled with; 0 is greedy.
        prompt, tokens: ids of the prompt and of what came behind it.
    """

    task: str
    index: int
    temperature: float
    prompt: list[int]
    tokens: list[int]

    @property
    def row(self) -> Row:
        """The text as a row of a study."""
        return Row({"task": self.task, "index": self.index, "temperature": self.temperature}, self)


NAMES = [each.name for each in fields(Text)]


def load_texts(path: str | Path) -> list[Text]:
    """Read one text a line, as tables.py texts writes it; a last line without its end is no text yet.

    Raises:
        ValueError: a line that is no text, named by its number.
    """
    texts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            found = json.loads(line)
            texts.append(Text(**{name: found[name] for name in NAMES}))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            remedy = "write the file with python scripts/tables.py texts"
            raise UserError(f"{path}, line {number} is no text ({error}); {remedy}") from None
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """How many steps and step tokens a draft source needs for one text.

    Args:
        tokens: number of the text's tokens.
        steps: number of decode steps to its end.
        step_tokens: tokens that all steps compute together, `c` of each included.
    """

    tokens: int
    steps: int
    step_tokens: int

    @property
    def compression(self) -> float:
        """S: tokens a step."""
        return self.tokens / self.steps

    @property
    def tokens_a_step(self) -> float:
        """Mean number of tokens that a step computes."""
        return self.step_tokens / self.steps


def replay(
    source: DraftSource,
    prompt: Sequence[int],
    tokens: Sequence[int],
    budget: int,
    max_new_tokens: int | None = None,
) -> Replay:
    """Count the steps of a decoder without a window whose source learns from the text alone.

    Args:
        source: proposes the drafts; must be new, and built for this prompt.
        prompt: token ids that the text continues.
        tokens: token ids of the text, at least one.
        budget: most draft tokens that a step may have.
        max_new_tokens: most tokens that the call asked for; nodes past it are not computed. None: the text's number.
    """
    no_samples = StepSamples.of([], [], [], [], TopLogits.empty())
    text = list(prompt)
    whole = [*prompt, *tokens]
    last = len(prompt) + (max_new_tokens or len(tokens))
    steps = 0
    step_tokens = 0
    while len(text) < len(whole):
        tree = source.propose(text, budget, WindowDrafts(), None)
        moved = _accepted(tree, whole[len(text) :]) + 1
        steps += 1
        step_tokens += 1 + sum(depth < last - len(text) for depth in _depths(tree))
        text = whole[: len(text) + moved]
        source.observe(text, moved, no_samples)
    return Replay(tokens=len(tokens), steps=steps, step_tokens=step_tokens)


def _accepted(tree: DraftTree, rest: Sequence[int]) -> int:
    """Accepted tokens of the text's rest; the bonus token follows them, so the last of the text is never accepted."""
    node = -1
    children = {edge: child for child, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    for count, token in enumerate(rest[:-1]):
        child = children.get((node, token))
        if child is None:
            return count
        node = child
    return len(rest) - 1


def _depths(tree: DraftTree) -> list[int]:
    """Depth of every node; 1 is behind the root."""
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths
