"""Candidate sources replayed against texts that a model wrote, without the model.

Decoding is exact, so a source that learns from the text alone takes the very steps of a run when it is asked for
candidates behind each prefix of the known text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lp.draft.source import DraftSource, StepSamples
from lp.draft.tree import DraftTree
from lp.draft.window import WindowDrafts
from lp.errors import UserError
from lp.sampling.top_logits import TopLogits


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What the model made of one prompt.

    Args:
        task: name of the set the prompt is from.
        index: of the prompt in its set, which sampled noise depends on too.
        temperature: it was sampled with; 0 is greedy.
        prompt, tokens: ids of the prompt and of what came behind it.
    """

    task: str
    index: int
    temperature: float
    prompt: list[int]
    tokens: list[int]

    @property
    def key(self) -> tuple[str, int, float]:
        """Tells it from the others of a file."""
        return self.task, self.index, self.temperature

    def line(self) -> str:
        """The text as one line of JSONL."""
        return json.dumps(asdict(self)) + "\n"


def load_texts(path: str | Path) -> list[Text]:
    """Read one text a line, as `Text.line` writes it; a last line without its end is no text yet.

    Raises:
        ValueError: a line that is no text, named by its number.
    """
    texts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            texts.append(Text(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(
                f"{path}, line {number} is no text ({error}); write the file with scripts/texts.py"
            ) from None
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What a source did on one text.

    Args:
        tokens: of the text.
        steps: that it takes.
        slots: rows of all steps, `c` of each included.
    """

    tokens: int
    steps: int
    slots: int

    @property
    def compression(self) -> float:
        """S: tokens a step."""
        return self.tokens / self.steps

    @property
    def rows(self) -> float:
        """Mean rows a step."""
        return self.slots / self.steps


def replay(
    source: DraftSource,
    prompt: Sequence[int],
    tokens: Sequence[int],
    budget: int,
    max_new_tokens: int | None = None,
) -> Replay:
    """The steps of a decoder without a window whose source learns from the text alone.

    Args:
        source: made for this prompt.
        prompt: ids the text continues.
        tokens: the text, at least one token.
        budget: candidate rows a step, at most.
        max_new_tokens: asked for in the call; nodes past it take no row. None: what the text has, as if it ended there.
    """
    nothing = StepSamples([], [], [], [], [], TopLogits.empty(), [])
    text, end, steps, slots = list(prompt), len(prompt) + len(tokens), 0, 0
    last = len(prompt) + (max_new_tokens or len(tokens))
    whole = [*prompt, *tokens]
    while len(text) < end:
        tree = source.propose(text, budget, WindowDrafts(), None)
        moved = _accepted(tree, whole[len(text) :]) + 1
        steps, slots = steps + 1, slots + 1 + sum(depth < last - len(text) for depth in _depths(tree))
        text = whole[: len(text) + moved]
        source.observe(text, moved, nothing)
    return Replay(tokens=len(tokens), steps=steps, slots=slots)


def _accepted(tree: DraftTree, truth: Sequence[int]) -> int:
    """How many tokens the walk accepts; the one after them is the bonus, so the last of the text never is accepted."""
    node, children = -1, {edge: child for child, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    for count, token in enumerate(truth[:-1]):
        child = children.get((node, token))
        if child is None:
            return count
        node = child
    return len(truth) - 1


def _depths(tree: DraftTree) -> list[int]:
    """Of every node; 1 is behind the root."""
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths
