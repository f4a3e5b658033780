"""Cases of decoding, drawn from seeds.

A case is data: JSON of it is all that is needed to run it again (`tests.support.fuzzing`).
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
import transformers as tf
from transformers import LogitsProcessor

import lp
from lp.attention.flash import SHORT
from lp.models.adapters import check_text_adapter
from lp.models.prompt_images import EXACT_WITH_VIDEOS
from lp.models.recurrent_layers import MODEL_TYPES
from lp.models.support import check_supported
from lp.models.tensor_parallel import STYLES
from lp.optional import is_installed
from tests.support.adapted import NAMES, add_adapters, linear_layers
from tests.support.image_models import IMAGE_MODELS, image_prompt, video_prompt
from tests.support.image_models import VOCABULARY as IMAGE_VOCABULARY
from tests.support.peft_releases import takes_peft
from tests.support.pools import drawn_switches
from tests.support.processors import Alternating
from tests.support.quantised import IN_PLACE
from tests.support.tiny_models import MATRIX, drawn_text, tiny_config, tiny_model

# Whose sizes may be drawn: nothing in their configs goes layer by layer.
RESIZED = [
    "llama", "mistral", "mistral_sliding", "qwen2", "qwen2_sliding", "qwen3", "phi3", "gemma", "granite", "gpt_neox",
    "stablelm", "olmo2", "starcoder2", "phi3_sliding",
]  # fmt: skip
STOPPABLE = 8  # fewest tokens of a vocabulary that has strings to stop at
FAR = [*RESIZED, *["llama", "qwen2"] * 6]  # of long cases: more of those whose biases make rows look near
LONG, LONG_EVERY = 2 * SHORT, 4  # tokens of the longest prompts; cases for a long one, on one rank and on several
PEERS: dict[str, Any] = {
    "prompt_lookup": lp.PromptLookupConfig,
    "paper": lp.PaperConfig,
    "recycling": lp.RecyclingConfig,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a prompt and what is asked for; the defaults are the simplest there is.

    Attributes:
        arch, model_seed, sharpness, recency, overrides: which model it is; arguments of `tiny_model`.
        backend: name of the attention backend.
        method: "lookahead" or one of PEERS, with their default settings.
        config: fields of LookaheadConfig.
        ids: token ids of the prompt.
        new: most tokens to add.
        ranks: number of ranks, which are threads in lockstep.
        tp: number of ranks that hold one replica between them; divides `ranks`.
        sampling: fields of SamplingParams.
        processors: names of PROCESSORS that the scores go through, in this order.
        eos: ids that end the text.
        stop_strings: strings that end the text.
        criterion: the text ends where the sum of all ids is a multiple of this number; 0 for never.
        prefill_chunk: most prompt tokens in one pass.
        calls: how many times the same decoder generates the text.
        turns: calls of a chat; a later prompt is the text so far and some more, for the same decoder or engine.
        step_times: seed of the step times by which an adaptive budget decides.
        captured: steps are padded to a few fixed shapes and run from static buffers, as a graph runs them.
        logits: logits of every token are compared too, which shows faults that change no token; one rank alone.
        company: number of other drawn texts that share steps with this one in an engine; then steps are not captured.
        grammar: seed of a `ToyGrammar` that the text follows; 0 for none.
        prediction: the text itself is predicted, with this percentage of its tokens changed; -1 for nothing.
        sequence: number of the sequence, which sampling noise depends on.
        gpu: the decoder runs on simulated GPUs, one a rank, and "off" or "auto" captures; "" for none.
        server: the text is asked of a server over HTTP, and so many others at the same time; -1 for none.
        bitwise: dtype of the weights in the mode `exact="bitwise"`, where logits are those of `PlainDecoder` in it
            bit for bit, and nothing is promised against `generate`; "" for the usual mode, in float64.
        corpora: seed of corpora that the pool looks in, which have much of the text; 0 for none.
        history: seed of the texts that a history has from the start; those that end join it; 0 for no history.
        images: number of images in the prompt, which `image_prompt` draws with `model_seed`; then `arch` is one of
            IMAGE_MODELS. 0 for none.
        video: whether there is a video behind the images, which may be none then.
        adapters: seed of LoRA adapters, of which the text chooses one, and others in its company any; 0 for none.
        kv_dtype: what caches hold keys and values as: "int8" or "fp8"; "" for the model's dtype.
        quantised: how torchao quantises the weights of linear layers, one of IN_PLACE; "" for not at all.
    """

    arch: str = "llama"
    model_seed: int = 0
    sharpness: float = 3.0
    recency: float = 0.0
    overrides: dict[str, Any] = field(default_factory=dict)
    backend: str = "auto"
    method: str = "lookahead"
    config: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=lambda: [1])
    new: int = 1
    ranks: int = 1
    tp: int = 1
    sampling: dict[str, Any] | None = None
    processors: list[str] = field(default_factory=list)
    eos: list[int] = field(default_factory=list)
    stop_strings: list[str] = field(default_factory=list)
    criterion: int = 0
    prefill_chunk: int = 512
    calls: int = 1
    step_times: int = 0
    captured: bool = False
    logits: bool = False
    company: int = 0
    turns: int = 1
    grammar: int = 0
    prediction: int = -1
    sequence: int = 0
    gpu: str = ""
    server: int = -1
    bitwise: str = ""
    corpora: int = 0
    history: int = 0
    images: int = 0
    video: bool = False
    adapters: int = 0
    kv_dtype: str = ""
    quantised: str = ""

    @classmethod
    def drawn(
        cls,
        seed: str,
        ranks: int,
        long: bool = False,
        archs: Sequence[str] | None = None,
        wanted: Collection[str] = (),
    ) -> Case:
        """Draw the case of a seed; a long one has few new tokens behind a prompt about as long as SHORT, or twice that.

        Args:
            seed: the same seed draws the same case.
            ranks: number of ranks.
            long: whether the prompt is long.
            archs: architectures to draw from; None: any that is supported.
            wanted: names of FEATURES that the case is to have, where they go together.
        """
        rng = random.Random(seed)
        if archs is None:
            fitting = [name for name in KINDS if name in wanted]
            archs = _kinds()[fitting[0]] if fitting and not long else None

        def takes(name: str, chance: float) -> bool:
            return name in wanted or rng.random() < chance

        arch = rng.choice(archs or (FAR if long else RESIZED if rng.random() < 0.6 else supported()))
        overrides = _drawn_sizes(rng, arch)
        vocabulary = overrides["vocab_size"]
        fewest = rng.choice([1, 1, 1, 40])
        eos = [rng.randrange(vocabulary) for _ in range(rng.choice([0, 1, 3]))] if vocabulary > 2 else []
        strings = ["".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
        sampled = takes("sampled", 0.8 if long else 0.4) or "warpers" in wanted
        method = rng.choice([*PEERS] if takes("another method", 0.25) else ["lookahead"])
        method = "lookahead" if {"adaptive", "session pool", "broadcast", "corpora", "history"} & {*wanted} else method
        config = _drawn_config(rng, method)
        if method == "lookahead":
            config |= {"adaptive": True} if "adaptive" in wanted else {}
            config |= {"pool_scope": "session"} if "session pool" in wanted else {}
            config |= {"kv_sync": "broadcast"} if "broadcast" in wanted else {}
        length, new, chunks = rng.randint(fewest, max(fewest, 60)), rng.randint(1, 60), [1, 7, 64, 512]
        if long:  # or the text grows past SHORT while it is generated
            overrides |= {"max_position_embeddings": 2 * LONG} | ({"attention_bias": True} if arch == "llama" else {})
            eos, length = [], rng.choice([rng.randint(SHORT - 20, SHORT), rng.randint(SHORT, LONG)])
            new, chunks = rng.randint(8, 24), [64, 512]
        sampling = _drawn_sampling(rng) if sampled else None
        if sampling and "warpers" in wanted and len(sampling) == 2:
            sampling["top_p"] = 0.8
        ends = vocabulary >= STOPPABLE and takes("stop strings", 0.2)
        drawn = cls(
            arch=arch,
            model_seed=rng.randrange(1000),
            sharpness=rng.choice([3.0, 6.0, 6.0] if long else [0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 6.0]),
            recency=rng.choice([0.0, 2.0, 2.0]) if long else 0.0,
            overrides=overrides,
            backend=rng.choice(["auto"] * (8 if long else 1) + ["sdpa", "eager"]) if arch in RESIZED else "auto",
            method=method,
            config=config,
            ids=drawn_text(rng, length, vocabulary),
            new=new,
            ranks=ranks,
            sampling=sampling,
            processors=rng.sample([*PROCESSORS], rng.choice([1, 2]) if takes("processors", 0.4) else 0),
            eos=eos if "eos" not in wanted or eos or vocabulary <= 2 else [rng.randrange(vocabulary)],
            stop_strings=strings if ends else [],
            criterion=37 if takes("criterion", 0.15) else 0,
            prefill_chunk=rng.choice(chunks),
            calls=2 if takes("calls", 0.25) else 1,
            step_times=rng.randrange(1000),
            captured=takes("captured", 0.1 if long else 0.3),
            logits=ranks == 1 and takes("logits", 0.8 if long else 0.5),
            tp=_drawn_tp(rng, arch, ranks, overrides, "tp" in wanted),
            company=rng.choice([1, 2, 5]) if takes("company", 0.5) and "captured" not in wanted else 0,
            turns=2 if takes("turns", 0.1) else 1,
            grammar=rng.randrange(1, 1000) if takes("grammar", 0.1) else 0,
            prediction=rng.choice([0, 10, 100]) if takes("prediction", 0.15) else -1,
            sequence=rng.choice([1, 7]) if takes("sequence", 0.2) else 0,
            gpu=rng.choice(["off", "auto"]) if takes("gpu", 0.02) and not long else "",
            server=rng.choice([0, 1, 3]) if takes("server", 0.03) else -1,
        )
        drawn = _fitting(drawn, rng)
        own = random.Random(f"bitwise-{seed}")
        if "bitwise" in wanted or own.random() < 0.08:
            drawn = replace(drawn, bitwise=own.choice(["float32", "bfloat16"]))
        own = random.Random(f"corpora-{seed}")
        if method == "lookahead" and ("corpora" in wanted or own.random() < 0.1):
            drawn = replace(drawn, corpora=own.randrange(1, 1000))
        own = random.Random(f"history-{seed}")
        if method == "lookahead" and ("history" in wanted or own.random() < 0.1):
            drawn = replace(drawn, history=own.randrange(1, 1000))
        own = random.Random(f"images-{seed}")
        if not {*_NEVER_WITH_IMAGES} & {*wanted} and ("images" in wanted or (archs is None and own.random() < 0.06)):
            drawn = _with_images(drawn, own)
        drawn = _bitwise(drawn)
        own = random.Random(f"adapters-{seed}")
        if ("adapters" in wanted or own.random() < 0.08) and takes_adapters(drawn):
            drawn = replace(drawn, adapters=own.randrange(1, 1000))
        own = random.Random(f"kv_dtype-{seed}")
        if ("kv_dtype" in wanted or own.random() < 0.08) and takes_kv_dtype(drawn.arch):
            drawn = replace(drawn, kv_dtype=own.choice(["int8", "fp8"]))
        own = random.Random(f"quantised-{seed}")
        if ("quantised" in wanted or own.random() < 0.08) and takes_quantised(drawn):
            drawn = replace(drawn, quantised=own.choice([*IN_PLACE]))
        return drawn

    def json(self) -> str:
        """The case as JSON, which `scripts/fuzz.py --case` runs again; fields that have their default are left out."""
        return json.dumps({key: value for key, value in asdict(self).items() if value != asdict(Case())[key]})


def _fitting(case: Case, rng: random.Random) -> Case:
    """The case without settings that do not go together with its others."""
    if case.gpu and (case.server >= 0 or case.ranks > 4):
        case = replace(case, gpu="")
    if case.server >= 0 and case.ranks > 1:
        case = replace(case, server=-1)
    if case.gpu:  # which is slow
        case = replace(case, tp=1, captured=False, backend="auto", new=min(case.new, 16), company=min(case.company, 1))
    if case.server >= 0:  # what a request of /completion has
        case = replace(
            case, processors=[], criterion=0, logits=False, stop_strings=[], grammar=0, prediction=-1, sequence=0,
            captured=False, company=0,
        )  # fmt: skip
    if case.company or kind(case.arch) == "shifting":
        case = replace(case, captured=False)
    if case.grammar:
        ends = case.eos or [rng.randrange(case.overrides["vocab_size"])]
        kept = [name for name in case.processors if name not in FORBIDDING]
        case = replace(case, processors=kept, eos=ends)
    return case


def takes_adapters(case: Case) -> bool:
    """Whether texts of a case may choose LoRA adapters."""
    images = case.images or case.video
    never = images or case.bitwise or case.gpu or case.server >= 0 or case.tp > 1 or kind(case.arch) == "shifting"
    return not never and _has_linear_layers(case.arch)


def takes_kv_dtype(arch: str) -> bool:
    """Whether an architecture has keys and values, and transformers' `generate` keeps the cache that it is given: some
    make another one where rotary frequencies change.
    """
    return arch != "mamba2" and kind(arch) != "shifting"


def takes_quantised(case: Case) -> bool:
    """Whether the weights of a case may be quantised: by torchao, on a CPU, without adapters."""
    return is_installed("torchao") and not (case.gpu or case.adapters)


@cache
def _has_linear_layers(arch: str) -> bool:
    """Whether PEFT's adapters of an architecture are LoRA of linear layers alone, and not of experts too."""
    model = tiny_model(arch)
    if not linear_layers(model) or not takes_peft():
        return False
    add_adapters(model, names=NAMES[:1])
    try:
        check_text_adapter(model, NAMES[0])
    except ValueError:
        return False
    return True


def _with_images(case: Case, rng: random.Random) -> Case:
    """The case with a prompt that has images, for a model that takes them."""
    arch = rng.choice(IMAGE_MODELS)
    images = rng.randint(1, 3)
    words = rng.choice([1, 3, 12])
    prompt = image_prompt(arch, case.model_seed, images, words=words)
    video = arch in EXACT_WITH_VIDEOS and rng.random() < 0.5
    if video:
        images = rng.randint(0, 2)
        prompt = video_prompt(arch, case.model_seed, images, words)
    return replace(
        case, arch=arch, images=images, video=video, ids=prompt["input_ids"][0].tolist(),
        overrides={"vocab_size": IMAGE_VOCABULARY},
        sharpness=3.0, recency=0.0, backend="auto", tp=1, gpu="", server=-1, bitwise="", turns=1,
        eos=[token for token in case.eos if token < IMAGE_VOCABULARY] or ([0] if case.grammar else []),
    )  # fmt: skip


def _bitwise(case: Case) -> Case:
    """The case with settings that `exact="bitwise"` takes; without the mode where the architecture is refused by it."""
    if not case.bitwise or not takes_bitwise(case.arch):
        return replace(case, bitwise="")
    return replace(case, backend="auto", captured=False, gpu="", tp=1, logits=case.ranks == 1 and case.server < 0)


@cache
def takes_bitwise(arch: str) -> bool:
    """Whether `exact="bitwise"` can be had with an architecture."""
    try:
        lp.PlainDecoder(tiny_model(arch, dtype=torch.float32), exact="bitwise")
    except ValueError:
        return False
    return True


KINDS = ("hybrid", "sliding", "shifting", "experts", "other architecture")  # of architectures


@cache
def kind(arch: str) -> str | None:
    """Which of KINDS an architecture is; None for a plain one, and for those that take images."""
    if arch in IMAGE_MODELS:
        return None
    config = _default_config(arch)
    if {config.model_type, config.get_text_config().model_type} & {*MODEL_TYPES}:
        return "hybrid"
    if "sliding" in arch or arch in ("gemma3", "gemma2", "starcoder2", "cohere2", "gpt_oss", "llama4"):
        return "sliding"
    if arch in ("llama_dynamic", "llama_longrope", "phi3_longrope"):
        return "shifting"
    if any(part in arch for part in ("moe", "mixtral", "deepseek")):
        return "experts"
    return None if arch in RESIZED else "other architecture"


@cache
def _kinds() -> dict[str, list[str]]:
    """The architectures of each kind."""
    return {name: [arch for arch in supported() if kind(arch) == name] for name in KINDS}


@cache
def supported() -> list[str]:
    """Architectures of MATRIX that `lp` takes."""
    names = []
    for arch in MATRIX:
        try:
            check_supported(tiny_config(arch))
        except ValueError:
            continue
        names.append(arch)
    return names


@cache
def _default_config(arch: str) -> Any:
    """The tiny config of an architecture, to be read only: to make one takes some milliseconds."""
    return tiny_config(arch)


def _drawn_sizes(rng: random.Random, arch: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"vocab_size": rng.choice([2, 5, 17, 61, 61, 61, 300])}
    if hasattr(_default_config(arch), "vocab_size_per_layer_input"):
        sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]
    if arch not in RESIZED:
        return sizes
    sizes |= {"num_hidden_layers": rng.randint(1, 3), "num_key_value_heads": rng.choice([1, 2, 4])}
    if "sliding" in arch or arch == "starcoder2":
        sizes |= {"sliding_window": rng.randint(4, 40)}
    return sizes | ({"max_position_embeddings": 64} if rng.random() < 0.2 else {})


def _drawn_tp(rng: random.Random, arch: str, ranks: int, overrides: dict[str, Any], wanted: bool) -> int:
    """How many ranks hold a replica between them: 1 where there is no plan of how to divide the architecture."""
    config = _default_config(arch)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or not {*plan.values()} <= STYLES.keys() or not getattr(config, "num_attention_heads", 0):
        return 1
    kv_heads = overrides.get("num_key_value_heads", getattr(config, "num_key_value_heads", 4))
    heads = config.num_attention_heads, kv_heads, overrides["vocab_size"]
    fitting = [size for size in (2, 4) if ranks % size == 0 and heads[0] % size == 0 and heads[2] >= size]
    fitting = [size for size in fitting if heads[1] % size == 0 or size % heads[1] == 0]
    return rng.choice(fitting if wanted and fitting else [1, *fitting])


def _drawn_config(rng: random.Random, method: str) -> dict[str, Any]:
    sync = {"kv_sync": rng.choice(["recompute", "broadcast"])}
    if method != "lookahead":
        return {}
    shape = {"window_size": rng.randint(0, 12), "ngram_size": rng.randint(2, 6), "guess_set_size": rng.randint(0, 12)}
    policy = {
        "draft_depth": rng.choice([None, 1, 9, 48]),
        "warmup_steps": rng.choice([0, 0, 0, 3]),
        "pool_scope": rng.choice(["request", "session"]),
        "window_noise": rng.random() < 0.8,
    }
    return shape | policy | drawn_switches(rng) | sync


def _drawn_sampling(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {"seed": rng.randrange(1 << 40), "temperature": rng.choice([0.3, 0.8, 1.0, 2.0])}
    warpers = {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.2}
    return drawn | {name: value for name, value in warpers.items() if rng.random() < 0.25}


def _some_eos(case: Case) -> list[int]:
    return case.eos or [0]


PROCESSORS: dict[str, Callable[[Case, str], LogitsProcessor]] = {
    "repetition": lambda case, on: tf.RepetitionPenaltyLogitsProcessor(1.3),
    "no_repeat": lambda case, on: tf.NoRepeatNGramLogitsProcessor(3),
    "bad_words": lambda case, on: tf.NoBadWordsLogitsProcessor([[1], [0, 0]]),
    "bias": lambda case, on: tf.SequenceBiasLogitsProcessor(
        [[[1], -2.0], [[2 % case.overrides["vocab_size"], 1], 4.0]]
    ),
    "min_length": lambda case, on: tf.MinLengthLogitsProcessor(30, _some_eos(case), device=on),
    "min_new": lambda case, on: tf.MinNewTokensLengthLogitsProcessor(len(case.ids), 8, _some_eos(case), device=on),
    "forced_eos": lambda case, on: tf.ForcedEOSTokenLogitsProcessor(len(case.ids) + case.new, _some_eos(case), on),
    "at_begin": lambda case, on: tf.SuppressTokensAtBeginLogitsProcessor([0, 1], len(case.ids) + 2, device=on),
    "suppress": lambda case, on: tf.SuppressTokensLogitsProcessor([0], device=on),
    "decay": lambda case, on: tf.ExponentialDecayLengthPenalty((4, 1.1), _some_eos(case), len(case.ids)),
    "own": lambda case, on: Alternating(),
}
# They may forbid all that a grammar allows.
FORBIDDING = {"no_repeat", "bad_words", "min_length", "min_new", "forced_eos", "at_begin", "suppress"}


# What a case may have, pairs of which are to be met.
FEATURES: dict[str, Callable[[Case], bool]] = {
    **{name: (lambda case, name=name: kind(case.arch) == name) for name in KINDS},
    "several ranks": lambda case: case.ranks > 1,
    "tp": lambda case: case.tp > 1,
    "broadcast": lambda case: case.ranks > case.tp and case.config.get("kv_sync") == "broadcast",
    "long": lambda case: len(case.ids) >= SHORT - 20,
    "sampled": lambda case: case.sampling is not None,
    "warpers": lambda case: case.sampling is not None and len(case.sampling) > 2,
    "processors": lambda case: bool(case.processors),
    "eos": lambda case: bool(case.eos),
    "stop strings": lambda case: bool(case.stop_strings),
    "criterion": lambda case: bool(case.criterion),
    "calls": lambda case: case.calls > 1,
    "turns": lambda case: case.turns > 1,
    "captured": lambda case: case.captured,
    "logits": lambda case: case.logits,
    "company": lambda case: case.company > 0,
    "another method": lambda case: case.method != "lookahead",
    "adaptive": lambda case: bool(case.config.get("adaptive")),
    "session pool": lambda case: case.config.get("pool_scope") == "session",
    "grammar": lambda case: bool(case.grammar),
    "prediction": lambda case: case.prediction >= 0,
    "sequence": lambda case: case.sequence > 0,
    "gpu": lambda case: bool(case.gpu),
    "server": lambda case: case.server >= 0,
    "bitwise": lambda case: bool(case.bitwise),
    "corpora": lambda case: bool(case.corpora),
    "history": lambda case: bool(case.history),
    "images": lambda case: bool(case.images or case.video),
    "adapters": lambda case: bool(case.adapters),
    "kv_dtype": lambda case: bool(case.kv_dtype),
    "quantised": lambda case: bool(case.quantised),
}
_NEVER_WITH_IMAGES = {"long", "turns", "gpu", "server", "bitwise", "tp", *KINDS}
# Which never go together, and why: nothing else may be missing from a run that is long enough.
NEVER = [
    ({"long"}, {"gpu", "hybrid", "shifting", "experts", "other architecture"}),  # what a long case is
    ({"captured"}, {"company", "server", "gpu", "shifting"}),  # a simulated GPU captures by itself
    ({"server"}, {"processors", "criterion", "logits", "stop strings", "grammar", "prediction", "sequence", "company"}),
    ({"server", "logits"}, {"several ranks", "tp", "broadcast"}),
    ({"gpu"}, {"server", "tp"}),
    ({"bitwise"}, {"hybrid", "shifting", "captured", "gpu", "tp"}),
    ({"another method"}, {"adaptive", "session pool", "broadcast", "corpora", "history"}),
    ({*KINDS}, {*KINDS}),
    ({"images"}, _NEVER_WITH_IMAGES),
    ({"adapters"}, {"images", "bitwise", "gpu", "server", "tp", "shifting"}),
    ({"kv_dtype"}, {"shifting"}),
    ({"quantised"}, {"gpu", "adapters"}),
]


def features(case: Case) -> list[str]:
    """Names of the FEATURES that a case has, for the count of pairs that cases have met."""
    return [name for name, has in FEATURES.items() if has(case)]


SEVERAL = {"several ranks", "tp", "broadcast"}  # which need several ranks
ALONE = {"logits", "server"}  # and these one


@cache
def pairs(ranks: Literal["one", "several", "any"] = "any") -> list[tuple[str, str]]:
    """All pairs of features that may go together on so many ranks: those that a run of the fuzzer is to meet. Where
    torchao is not installed no weights are quantised, and where transformers refuses PEFT's release no text has an
    adapter.
    """
    out = {"one": SEVERAL, "several": ALONE, "any": set[str]()}[ranks]
    out = out if is_installed("torchao") else out | {"quantised"}
    out = out if takes_peft() else out | {"adapters"}

    def never(one: str, other: str) -> bool:
        return any((one in some and other in rest) or (other in some and one in rest) for some, rest in NEVER)

    return [pair for pair in itertools.combinations(FEATURES, 2) if not never(*pair) and not out & {*pair}]


WANTED_EVERY = 2  # every other case has a pair of features that is given


def drawn(
    seed: int, number: int, share: float, archs: Sequence[str] | None = None, wanted: Collection[str] = ()
) -> Case:
    """Case `number` of a seed; this share of the numbers, evenly spread, has several ranks, and some are long.

    Every other case is given two features, each pair in turn.

    Args:
        archs: architectures to draw from, in cases that are not long; None: any that is supported.
        wanted: names of FEATURES that every case is to have, where they go together.
    """
    before = int(number * share)
    several = int((number + 1) * share) > before
    index = before if several else number - before  # among those of one rank, or of several
    pair: tuple[str, ...] = ()
    if index % WANTED_EVERY == 0:
        from_these = pairs("several" if several else "one")
        pair = from_these[(index // WANTED_EVERY * 101 + seed) % len(from_these)]  # neighbours have other features
    ranks = 2 + (2 * (number % 2) if "tp" in pair else number % 7) if several else 1
    long = "long" in pair or (not (pair or archs) and index % (2 * LONG_EVERY) == 1)
    return Case.drawn(f"{seed}-{number}", ranks, long, archs, {*pair, *wanted})
