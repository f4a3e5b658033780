"""The settings of a chat that /set changes: sampling, and the length of answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lp
from lp.checks import check_int
from lp.errors import UserError
from lp.sampling.generation_config import CheckpointDefaults
from lp.sampling.params import is_greedy

from ..config.sampling import sampled_by_checkpoint, sampling_of
from ..config.schema import ChatConfig, frozen, mirror

# Sampling keys that say nothing about whether tokens are sampled, so that setting them leaves decoding greedy.
STAY_GREEDY = ("repetition_penalty", "seed", "verifier")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the next answers of a chat are sampled, and how long they may be.

    Args:
        sampling: sampling parameters; while `greedy`, only the repetition penalty takes effect.
        greedy: whether every token is the most likely one.
        max_new_tokens: most tokens of an answer.
        given: whether the config says how to sample; if so, the checkpoint's generation_config.json does not.
    """

    sampling: lp.SamplingParams
    greedy: bool
    max_new_tokens: int
    given: bool = False

    @classmethod
    def of(cls, config: ChatConfig) -> Settings:
        """Build a chat's first settings from the chat's config.

        Args:
            config: the chat's config.

        Raises:
            ValueError: a value out of range.
        """
        sampling = sampling_of(config)
        base = sampling or lp.SamplingParams(seed=config.seed)
        greedy = is_greedy(sampling)
        base = replace(base, temperature=1.0) if base.greedy else base
        given = sampling is not None
        return cls(sampling=base, greedy=greedy, max_new_tokens=config.max_new_tokens, given=given)

    def or_checkpoint(self, checkpoint: CheckpointDefaults) -> Settings:
        """Return these settings, with the checkpoint's own sampling if the config does not say how to sample.

        Args:
            checkpoint: what the checkpoint's generation_config.json asks for.
        """
        if self.given:
            return self
        sampling = sampled_by_checkpoint(None, checkpoint, self.sampling.seed)
        return self if sampling is None else replace(self, sampling=sampling, greedy=False)

    @property
    def chosen(self) -> lp.SamplingParams | None:
        """Sampling parameters to call the decoder with; None for greedy decoding."""
        if not self.greedy:
            return self.sampling
        if self.sampling.repetition_penalty == 1:
            return None
        return lp.SamplingParams(temperature=0.0, repetition_penalty=self.sampling.repetition_penalty)

    def changed(self, words: list[str]) -> Settings:
        """A copy with values changed, as /set does it.

        temperature=0 switches to greedy decoding. A key that shapes the distribution, such as top_p or another
        temperature, switches to sampling; `repetition_penalty`, `seed` and `verifier` do not.

        Args:
            words: "key=value" each, as in ["temperature=0.8", "top_p=0.95"].

        Raises:
            ValueError: an unknown key, or a value of another type or out of range.
        """
        new = self
        for word in words:
            key, equals, text = word.partition("=")
            if not equals:
                raise UserError(f"cannot read {word!r}; write /set key=value, as in /set temperature=0.8")
            new = new._with(key, text)
        return new

    def _with(self, key: str, text: str) -> Settings:
        if key == "max_new_tokens":
            given = int(text) if text.isdecimal() else text
            return replace(self, max_new_tokens=check_int(key, given, 1, float("inf"), "ask for at least one token"))
        known = [item.name for item in fields(lp.SamplingParams)]
        if key not in known:
            raise UserError(f"unknown setting {key!r}; known: {', '.join([*known, 'max_new_tokens'])}")
        values = OmegaConf.structured(mirror(lp.SamplingParams, "sample")(**asdict(self.sampling)))
        try:
            values[key] = None if text == "null" else text
        except OmegaConfBaseException as error:
            raise UserError(f"{key}: {str(error).splitlines()[0]}; /set shows the settings") from None
        if key == "temperature" and values[key] == 0:
            return replace(self, greedy=True)
        sampling = frozen(lp.SamplingParams, OmegaConf.to_object(values))
        return replace(self, sampling=sampling, greedy=self.greedy and key in STAY_GREEDY)

    def __str__(self) -> str:
        values = {**asdict(self.sampling), "max_new_tokens": self.max_new_tokens}
        if self.greedy:
            of_greedy = ("repetition_penalty", "max_new_tokens")
            waiting = {} if self.sampling.seed is None else {"seed": f"{self.sampling.seed} (unused)"}
            values = {"temperature": "0 (greedy)", **{name: values[name] for name in of_greedy}, **waiting}
        return " ".join(f"{key}={'null' if value is None else value}" for key, value in values.items())
