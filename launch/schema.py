"""Types of the configs in conf/, so that Hydra refuses unknown keys and wrong types.

Hydra merges YAML into a schema, which a frozen dataclass does not allow: the schemas of the decoders are unfrozen
mirrors of lp's own configs, and `frozen` builds the real one, whose `__post_init__` checks the values.
"""

from __future__ import annotations

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from lp.attention import choices
from lp.config import LookaheadConfig, PaperConfig, PromptLookupConfig, RecyclingConfig, SuffixConfig
from lp.parallel.context import DEFAULT_TIMEOUT_S
from lp.parallel.rendezvous import env_int
from lp.sampling.params import SamplingParams

from .bench.shapes import SHAPES

T = TypeVar("T")


class Output(StrEnum):
    """How an app reports; the names are what the user types."""

    table = "table"
    json = "json"


@dataclass
class ModelSchema:
    """What lp.models.loader.load takes; `name` is "demo", a folder, or a name on the hub."""

    name: str = MISSING
    dtype: str = "float32"
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass
class AttentionSchema:
    """How the rows of a step are run."""

    name: str = MISSING
    capture: str = "auto"


@dataclass
class GreedySchema:
    """The likeliest token has nothing to set."""

    HINT: ClassVar[str] = "sampling=sample has temperature, top_p and others"

    name: str = "greedy"


@dataclass
class ParallelSchema:
    """How ranks talk to each other; `nproc` makes an app that runs alone launch so many of itself."""

    backend: str = "auto"
    nproc: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class TaskSchema:
    """Where prompts come from: a JSONL file, without a path a data set on the hub, without either the package.

    `prompt`, `reference` and `id` name fields of the data set, or are templates of them, as in "Sum up: {article}".
    """

    name: str = MISSING
    path: str | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    prompt: str = "prompt"
    reference: str | None = None
    id: str | None = None
    chat: bool = False


@dataclass
class AutoregressiveSchema:
    """Plain decoding has nothing to set."""

    name: str = "autoregressive"


@dataclass
class PoolSchema:
    """How long the pool remembers, and how much."""

    scope: str = "request"
    mib: int = 16
    file: str | None = None


@dataclass
class Common:
    """What every app is given. The comments are in conf/base.yaml."""

    model: ModelSchema = field(default_factory=ModelSchema)
    decoder: Any = None
    attention: AttentionSchema = field(default_factory=AttentionSchema)
    sampling: Any = None
    parallel: ParallelSchema = field(default_factory=ParallelSchema)
    pool: PoolSchema = field(default_factory=PoolSchema)
    W: int = 16
    N: int = 2
    G: int = 104
    W_per_rank: int | None = None
    G_per_rank: int | None = None
    max_new_tokens: int = 128
    stop_strings: list[str] = field(default_factory=list)
    seed: int | None = 0


@dataclass
class Tasked(Common):
    """What apps are given that continue the prompts of a task."""

    task: TaskSchema = field(default_factory=TaskSchema)
    prompt: str | None = None
    prompt_file: str | None = None
    limit: int | None = None
    output: Output = Output.table
    repeats: int = 1


@dataclass
class Config(Tasked):
    """What launch.generate is given. The comments are in conf/config.yaml."""

    show_prompt: bool = True
    stream: bool = True
    compare: bool = True
    journal: str | None = None
    verbose: bool = False


@dataclass
class BenchmarkConfig(Tasked):
    """What launch.benchmark is given. The comments are in conf/benchmark.yaml."""

    methods: list[str] | None = None
    draft: str | None = None
    quality: bool = False
    out: str | None = None


@dataclass
class LinkSchema:
    """An all-gather over R ranks of so many bytes each: base + (R - 1) x (hop + bytes / bandwidth)."""

    base_us: float = MISSING
    hop_us: float = MISSING
    gb_s: float = MISSING
    source: str = MISSING


@dataclass
class ScalingConfig(BenchmarkConfig):
    """What launch.scaling is given. The comments are in conf/scaling.yaml."""

    ranks: list[int] = field(default_factory=list)
    project: bool = False
    projected_ranks: list[int] = field(default_factory=list)
    weak: bool = True
    links: dict[str, LinkSchema] = field(default_factory=dict)


@dataclass
class TuneConfig(Tasked):
    """What launch.tune is given. The comments are in conf/tune.yaml."""


@dataclass
class ChatConfig(Common):
    """What launch.chat is given. The comments are in conf/chat.yaml."""

    system: str | None = None
    history_file: str | None = None


@dataclass
class ScaleSchema:
    """How a shape is scaled down."""

    layers: int | None = None
    divide: int = 1


@dataclass
class ProfileConfig(Common):
    """What launch.profile is given. The comments are in conf/profile.yaml."""

    shape: ScaleSchema = field(default_factory=ScaleSchema)
    prefix: int = 1024
    rows: list[int] = field(default_factory=list)
    R: int | None = None
    rank: int | None = None
    rounds: int = 9
    compare: bool = True
    plot: bool = True
    output: Output = Output.table


def mirror(config: type, name: str) -> type:
    """An unfrozen dataclass with the fields of `config` and a `name`, which tells the decoders apart.

    An enum becomes a str: OmegaConf takes enums by member name, users know them by value.
    """
    hints = get_type_hints(config)
    members: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for item in fields(config):
        assert item.default is not NO_DEFAULT, f"{config.__name__}.{item.name} needs a default to be mirrored"
        is_enum = isinstance(hints[item.name], type) and issubclass(hints[item.name], Enum)
        default = str(item.default) if is_enum else item.default
        members.append((item.name, str if is_enum else hints[item.name], field(default=default)))
    return make_dataclass(f"{config.__name__}Schema", members)


def frozen(config: type[T], schema: Any) -> T:
    """Build the config that `schema` mirrors.

    Raises:
        ValueError: a value out of range, from the config itself.
    """
    return config(**{item.name: getattr(schema, item.name) for item in fields(config)})  # type: ignore[arg-type]


def settings(cfg: DictConfig) -> Any:
    """The config of a job as the dataclass of its app, interpolations resolved.

    Raises:
        ValueError: a key that the schema does not know; Hydra's `+key=value` lets it in.
        OmegaConfBaseException: a missing or unreadable value.
    """
    ranks = env_int("WORLD_SIZE", 1, low=1)
    for key in ("W", "G"):  # weak scaling: what a rank has stays the same however many there are
        if cfg[f"{key}_per_rank"] is not None:
            cfg[key] = cfg[f"{key}_per_rank"] * ranks
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Common)
    _refuse_extras(config, "")
    return config


def unknown_key(key: str, schema: Any) -> str:
    """Says that the last part of `key` is no field of `schema`, and which ones are."""
    known, hint = ", ".join(item.name for item in fields(schema)), getattr(schema, "HINT", "")
    return f"unknown config key {key!r}; known here: {known}" + f"; {hint}" * bool(hint)


def _refuse_extras(node: Any, prefix: str) -> None:
    for key, value in vars(node).items():
        if key not in {item.name for item in fields(node)}:
            raise ValueError(unknown_key(prefix + key, node))
        if is_dataclass(value):
            _refuse_extras(value, f"{prefix}{key}.")


def register() -> None:
    """Put the schemas where the defaults lists of conf/ find them: group `schema`."""
    schemas: dict[str, type] = {"generate": Config, "chat": ChatConfig, "profile": ProfileConfig, "tune": TuneConfig}
    schemas |= {"benchmark": BenchmarkConfig, "scaling": ScalingConfig}
    schemas |= {"model": ModelSchema, "attention": AttentionSchema, "parallel": ParallelSchema, "task": TaskSchema}
    schemas |= {"autoregressive": AutoregressiveSchema, "greedy": GreedySchema}
    schemas["lookahead"] = mirror(LookaheadConfig, "lookahead")
    schemas["lookahead_auto"] = mirror(LookaheadConfig, "lookahead_auto")
    schemas["prompt_lookup"] = mirror(PromptLookupConfig, "prompt_lookup")
    schemas["lookahead_paper"] = mirror(PaperConfig, "lookahead_paper")
    schemas["token_recycling"] = mirror(RecyclingConfig, "token_recycling")
    schemas["suffix"] = mirror(SuffixConfig, "suffix")
    schemas["sample"] = mirror(SamplingParams, "sample")
    for name, schema in schemas.items():
        ConfigStore.instance().store(group="schema", name=name, node=schema)
    for name in choices():
        ConfigStore.instance().store(group="attention", name=name, node=AttentionSchema(name=name))
    for name in SHAPES:
        ConfigStore.instance().store(group="model", name=name, node=ModelSchema(name=name, dtype="bfloat16"))
