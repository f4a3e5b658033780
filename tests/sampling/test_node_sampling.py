"""Sampling by tensors against transformers' own processors on the host, which are the oracle: bit for bit."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import transformers as tf

from lp.draft.layout import ancestors
from lp.sampling.node_sampling import (
    CallRules,
    NodeSampling,
    Numbers,
    Operation,
    ScoreRules,
    counts_at_nodes,
    finite_argmax,
)
from lp.sampling.penalties import CountPenalty, RecentRepetitionPenalty
from lp.sampling.processors import BranchProcessors
from lp.sampling.token_counts import TokenCounts
from lp.sampling.top_logits import INVALID_TOKEN

CPU = torch.device("cpu")
VOCABULARY = 97
# Some are tokens that a model embeds and cannot give, which transformers' repetition penalty did not always take.
try:
    tf.RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[VOCABULARY]]), torch.zeros(1, VOCABULARY))
    EMBEDDED = VOCABULARY + 3
except RuntimeError:
    EMBEDDED = VOCABULARY


class Text:
    """A drawn text with a tree of nodes behind it, and what it asks for.

    Attributes:
        processors: logits processors that its scores go through, in this order.
        tokens, parents: nodes that its step computes: `behind` catch-up tokens, `c` and the tree.
    """

    def __init__(self, rng: random.Random) -> None:
        self.padding = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 3]))]
        self.text = [rng.randrange(EMBEDDED) for _ in range(rng.randint(3, 40))]
        self.prompt_tokens = rng.randint(1, len(self.text))
        self.processors = drawn_processors(rng, len(self.padding) + self.prompt_tokens)
        self.behind = rng.randint(0, 2)
        size = rng.randint(1, 9)
        tree = [-1, *(rng.randrange(node) for node in range(1, size))]
        self.parents = [*range(-1, self.behind - 1), *(parent + self.behind for parent in tree)]
        self.tokens = self.text[len(self.text) - 1 - self.behind :]
        self.tokens += [rng.randrange(EMBEDDED) for _ in range(size - 1)]
        self.reachable = [True, *(rng.random() < 0.8 for _ in range(size - 1))]
        self.logits = 4 * torch.randn(size, VOCABULARY, generator=torch.Generator().manual_seed(rng.randrange(2**31)))

    @property
    def rules(self) -> ScoreRules:
        rules = ScoreRules.of(self.processors, len(self.padding))
        assert rules is not None
        return rules

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """Scores of every node by transformers' own processors: the oracle."""
        visible = ancestors(self.parents)
        branches: list[list[int] | None] = []
        for node, reachable in enumerate(self.reachable):
            on_path = visible[self.behind + node, self.behind + 1 :]
            branch = [token for token, seen in zip(self.tokens[self.behind + 1 :], on_path, strict=True) if seen]
            branches.append(branch if reachable else None)
        return BranchProcessors(self.processors, self.padding)(self.logits.to(dtype), branches, self.text)

    def counts(self, counted: TokenCounts) -> torch.Tensor:
        """How often each token stands before each node, as penalties need it."""
        first = len(self.text) - 1 - self.behind
        add_uncounted(counted, self.text, first, 4)
        positions = torch.tensor([first + int(row.sum()) - 1 for row in ancestors(self.parents)])
        return counts_at_nodes(
            counted.counts_QV[counted.place].repeat(len(self.reachable), 1),
            torch.tensor(self.tokens),
            positions >= counted.first_generated,
            torch.from_numpy(ancestors(self.parents)[self.behind :]),
        )


def add_uncounted(counted: TokenCounts, text: list[int], num_tokens: int, most: int) -> None:
    """Add what the counts lack, as a captured step does."""
    for index, value in counted.uncounted(text, num_tokens, most):
        counted.counts_QV.view(-1)[index] += value
    counted.counted(num_tokens)


def drawn_processors(rng: random.Random, prompt_tokens: int) -> list[Any]:
    choices = [
        lambda: tf.SuppressTokensLogitsProcessor([3, 5]),
        lambda: CountPenalty(prompt_tokens, rng.uniform(-2, 2), rng.uniform(-2, 2)),
        lambda: tf.RepetitionPenaltyLogitsProcessor(rng.uniform(0.5, 2.0)),
        lambda: tf.TemperatureLogitsWarper(rng.uniform(0.3, 2.0)),
        lambda: tf.TopKLogitsWarper(rng.choice([1, 5, 33, 500])),
        lambda: tf.TopPLogitsWarper(rng.choice([0.0, 1e-9, rng.uniform(0.0, 1.0)])),
        lambda: tf.MinPLogitsWarper(rng.uniform(0.0, 0.5)),
        lambda: tf.TypicalLogitsWarper(0.9),
        lambda: tf.TemperatureLogitsWarper(1.3),
    ]
    return [choice() for choice in choices if rng.random() < 0.5]


def sampling_of(texts: list[Text]) -> NodeSampling:
    """How the nodes of texts with the same functions are sampled by one call."""
    call = CallRules.of([text.rules for text in texts], False)
    numbers = torch.tensor([text.rules.numbers for text in texts for _ in text.reachable], dtype=torch.float64)
    reachable = torch.tensor([reached for text in texts for reached in text.reachable])[:, None]
    sampling = NodeSampling(call, texts[0].rules, numbers, reachable)
    if call.counts:
        buffer = torch.full((len(texts), VOCABULARY), 12345, dtype=torch.int32)  # as texts before left it
        counts = []
        for place, text in enumerate(texts):
            counted = TokenCounts(VOCABULARY, int(text.rules.numbers.first_counted), text.padding, CPU)
            counted.use(buffer, place)
            counts.append(text.counts(counted))
        sampling.counts = torch.cat(counts)
    return sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_processors(dtype: torch.dtype) -> None:
    """Texts that ask for different things share a call; one that asks for nothing must not be changed by it."""
    for case in range(150):
        rng = random.Random(f"scores-{case}")
        texts: list[Text] = []
        for text in (Text(rng) for _ in range(12)):
            if len(texts) < 4 and (not texts or text.rules.functions_key == texts[0].rules.functions_key):
                texts.append(text)
        logits = torch.cat([text.logits for text in texts]).to(dtype)
        found = sampling_of(texts).scores(logits)
        expected = torch.cat([text.expected(dtype).to(found.dtype) for text in texts])
        assert torch.equal(found, expected), case
        alone = texts[0]
        of_one = sampling_of([alone])
        of_one.numbers = of_one.numbers[:1]  # one row for all nodes
        assert torch.equal(of_one.scores(alone.logits.to(dtype)), alone.expected(dtype)), case


@pytest.mark.parametrize(
    "numbers",
    [
        Numbers(presence=1.0),
        Numbers(frequency=0.5),
        Numbers(repetition=1.5),
        Numbers(temperature=0.5),
        Numbers(top_k=3),
        Numbers(one_minus_top_p=0.3),
        Numbers(min_p=0.3),
    ],
)
def test_every_number_does_something(numbers: Numbers) -> None:
    """The test above would not see one that is never applied and never drawn; nor an operation that is forgotten."""
    assert [operation for operation in Operation if operation and operation in numbers.operations]
    rules = ScoreRules(numbers)
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(2, VOCABULARY, dtype=torch.int32)
    counts[:, :50] = 2
    table = torch.tensor([numbers], dtype=torch.float64)
    sampling = NodeSampling(CallRules.of([rules], False), rules, table, torch.ones(2, 1, dtype=torch.bool), counts)
    assert not torch.equal(sampling.scores(logits), logits)


@pytest.mark.parametrize(
    "processors",
    [
        [tf.NoRepeatNGramLogitsProcessor(2)],
        [RecentRepetitionPenalty(1.2, 5)],
        [CountPenalty(3, 0.5, 0.5, last=4)],
        [CountPenalty(1, 0.5, 0.5)],
        [tf.TopKLogitsWarper(3), tf.RepetitionPenaltyLogitsProcessor(1.2)],
        [tf.TypicalLogitsWarper(0.9), tf.TemperatureLogitsWarper(0.5), tf.RepetitionPenaltyLogitsProcessor(1.2)],
    ],
    ids=lambda processors: "-".join(type(processor).__name__ for processor in processors),
)
def test_what_no_numbers_can_say_is_left_to_the_host(processors: list[Any]) -> None:
    """The third penalty begins to count within the padding, 2 tokens, of which there are no positions."""
    assert ScoreRules.of(processors, padding=2) is None


@pytest.mark.parametrize(
    "warper",
    [
        tf.TopKLogitsWarper(3, filter_value=-50.0),
        tf.TopPLogitsWarper(0.5, min_tokens_to_keep=4),
        tf.MinPLogitsWarper(0.5, min_tokens_to_keep=4),
    ],
    ids=lambda warper: type(warper).__name__,
)
def test_other_settings_of_a_warper_are_its_own_code(warper: Any) -> None:
    rules = ScoreRules.of([tf.TemperatureLogitsWarper(0.5), warper])
    assert rules is not None and rules.after == (warper,) and rules.numbers == Numbers(temperature=0.5)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2))
    table = torch.tensor([rules.numbers], dtype=torch.float64)
    sampling = NodeSampling(CallRules.of([rules], False), rules, table, torch.ones(3, 1, dtype=torch.bool))
    assert torch.equal(sampling.scores(logits), warper(torch.zeros(3, 1, dtype=torch.int64), logits / 0.5))


def test_scores_of_no_use_sample_no_token() -> None:
    scores = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]])
    assert finite_argmax(scores).tolist() == [1, INVALID_TOKEN, 0, INVALID_TOKEN]
