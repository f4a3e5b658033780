"""Types of the configs in conf/, so that Hydra refuses unknown keys and wrong types.

Hydra merges YAML into a schema, which a frozen dataclass does not allow: the schemas of the decoders are unfrozen
mirrors of lp's own configs, and `frozen` builds the real one, whose `__post_init__` checks the values. The config group
`decoder` has no files: it is made of the registered draft sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from lp.attention.registry import attention_choices
from lp.checks import env_int
from lp.config import DEFAULT_SETUP_TIMEOUT_S, DEFAULT_TIMEOUT_S, LookaheadConfig
from lp.draft.registry import sources
from lp.errors import UserError
from lp.sampling.params import SamplingParams

from ..data.shapes import SHAPES
from .arguments import closest

T = TypeVar("T")
# Fields that a draft source's config takes from top-level keys, where it has them. One that is null is the config's own
# default.
SHAPE_KEYS = {"window_size": "W", "ngram_size": "N", "guess_set_size": "G"}
POOL_KEYS = {f"pool_{name}": f"pool.{name}" for name in ("scope", "mib", "file", "model_ngrams")}
LOOKAHEAD_PRESETS = {"lookahead_auto": {"adaptive": True}, "lookahead": {"adaptive": False}}  # of one config


class Output(StrEnum):
    """How an app reports; the names are what the user types."""

    table = "table"
    json = "json"


class TextOutput(StrEnum):
    """How an app reports whose first business is text."""

    table = "table"
    text = "text"
    json = "json"


@dataclass
class ModelSchema:
    """The model, as lp.load takes it.

    Args:
        name: "demo", a folder with config.json, a GGUF file, or a name on the hub.
        dtype: dtype of the weights: float64, float32, bfloat16, float16, or auto for what the checkpoint says.
        device: this rank's device: cpu, cuda, cuda:<number>, or auto for its GPU if there is one.
        attn_implementation: transformers' attention to load the model with; null takes sdpa where the model has it.
        trust_remote_code: run code that comes with the checkpoint.
    """

    name: str = MISSING
    dtype: str = "float32"
    device: str = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass
class AttentionSchema:
    """How the tokens of a step are computed.

    Args:
        name: the attention backend; auto takes flash where a model loaded with sdpa, flash-attn or flex can, and warns
            where it cannot.
        capture: whether steps have a few fixed shapes and their kernels are replayed: auto (a CUDA graph on a GPU, off
            elsewhere), off, graph or compile.
    """

    name: str = MISSING
    capture: str = "auto"


@dataclass
class GreedySchema:
    """Greedy decoding has nothing to set."""

    HINT: ClassVar[str] = "sampling=sample has temperature, top_p and others"

    name: str = "greedy"


@dataclass
class ParallelSchema:
    """How ranks talk to each other.

    Args:
        backend: what carries collectives: nccl, gloo, or auto for nccl where every rank has a GPU of its own, else
            gloo.
        nproc: an app that runs alone launches so many ranks of itself; null: the ranks are torchrun's.
        timeout_s: seconds that a rank waits for the others, at the start and in a step, before it ends with an error.
        setup_timeout_s: the same while ranks compile and capture steps ahead.
        tp: ranks that hold one copy of the model between them, where it is too large or too slow for one.
        one_shot_sums: sum small tensors of such ranks by torch's symmetric memory, where it gives NCCL's sums.
    """

    backend: str = "auto"
    nproc: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    setup_timeout_s: float = DEFAULT_SETUP_TIMEOUT_S
    tp: int = 1
    one_shot_sums: bool = False


@dataclass
class TaskSchema:
    """Where prompts come from: a JSONL file, without a path a data set on the hub, without either the package.

    Args:
        name: the task's name, in tables and files.
        path: the JSONL file.
        hub: name of the data set on the hub.
        subset: the data set's subset.
        split: the data set's split.
        prompt: field of the data set, or a template of fields, as in "Sum up: {article}".
        reference: field or template that gives a known answer.
        id: field or template that gives the prompt's name.
        ids: names of the prompts to take, in their order; null takes all.
        chat: put the prompt into the model's chat template, if it has one.
        check: how pass_at_1 judges a text: function, asserts, class or number; null for texts that nothing judges.
    """

    name: str = MISSING
    path: str | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    prompt: str = "prompt"
    reference: str | None = None
    id: str | None = None
    ids: list[str] | None = None
    chat: bool = False
    check: str | None = None


@dataclass
class PlainSchema:
    """Plain decoding has nothing to set."""

    name: str = "plain"


@dataclass
class AutoregressiveSchema:
    """The oracle has nothing to set."""

    name: str = "autoregressive"


@dataclass
class PoolSchema:
    """How long the n-gram pool lasts, and how large it grows.

    Args:
        scope: request, or session, with which it lasts from prompt to prompt.
        mib: most memory, MiB.
        file: with scope=session, a safetensors file that saves it from run to run.
        model_ngrams: a file of the model's n-grams, auto for the one beside the model, or off.
    """

    scope: str = "request"
    mib: int = 16
    file: str | None = None
    model_ngrams: str = "auto"


@dataclass
class Common:
    """The keys of every app. The comments are in conf/base.yaml."""

    model: ModelSchema = field(default_factory=ModelSchema)
    decoder: Any = None
    attention: AttentionSchema = field(default_factory=AttentionSchema)
    sampling: Any = None
    parallel: ParallelSchema = field(default_factory=ParallelSchema)
    pool: PoolSchema = field(default_factory=PoolSchema)
    W: int = 16
    N: int = 2
    G: int | None = None
    W_per_rank: int | None = None
    G_per_rank: int | None = None
    max_new_tokens: int = 128
    stop_strings: list[str] = field(default_factory=list)
    seed: int | None = 0
    exact: str = "auto"
    measure_step_times: bool = False


@dataclass
class Tasked(Common):
    """The keys of apps that continue the prompts of a task."""

    task: TaskSchema = field(default_factory=TaskSchema)
    prompt: str | None = None
    prompt_file: str | None = None
    limit: int | None = None
    repeats: int = 1


@dataclass
class Config(Tasked):
    """The keys of launch.generate. The comments are in conf/generate.yaml."""

    output: TextOutput = TextOutput.table
    show_prompt: bool = True
    stream: bool = True
    compare: bool = False
    journal: str | None = None
    json_schema: str | None = None
    verbose: bool = False
    generation_config: str = "auto"


@dataclass
class BenchmarkConfig(Tasked):
    """The keys of launch.benchmark. The comments are in conf/benchmark.yaml."""

    output: Output = Output.table
    methods: list[str] | None = None
    draft: str | None = None
    gguf: str | None = None
    prompt_tokens: int | None = None
    quality: bool = False
    pass_at_1: bool = False
    out: str | None = None


@dataclass
class LinkSchema:
    """An all-gather over R ranks of so many bytes each: base + (R - 1) x (hop + bytes / bandwidth).

    Args:
        base_us: microseconds of any collective.
        hop_us: microseconds of each further rank.
        gb_s: bandwidth, GB/s.
        source: where the figures are from.
    """

    base_us: float = MISSING
    hop_us: float = MISSING
    gb_s: float = MISSING
    source: str = MISSING


@dataclass
class NodesSchema:
    """The nodes that launch.scaling runs on, by the variables of torchrun.sh.

    Args:
        count: how many nodes there are.
        rank: this node's number, from 0.
        nproc: ranks of each node, where a world size needs several; null: one a GPU, or one.
        endpoint: host:port, a free port of node 0.
    """

    count: int = 1
    rank: int = 0
    nproc: int | None = None
    endpoint: str | None = None


@dataclass
class ScalingConfig(BenchmarkConfig):
    """The keys of launch.scaling. The comments are in conf/scaling.yaml."""

    ranks: list[int] = field(default_factory=list)
    tp: list[int] = field(default_factory=lambda: [1])
    nodes: NodesSchema = field(default_factory=NodesSchema)
    runs: int = 1
    project: bool = False
    projected_ranks: list[int] = field(default_factory=list)
    weak: bool = True
    links: dict[str, LinkSchema] = field(default_factory=dict)


@dataclass
class TuneConfig(Tasked):
    """The keys of launch.tune. The comments are in conf/tune.yaml."""

    output: Output = Output.table


@dataclass
class ChatConfig(Common):
    """The keys of launch.chat. The comments are in conf/chat.yaml."""

    system: str | None = None
    json_schema: str | None = None
    history_file: str | None = None
    generation_config: str = "auto"


@dataclass
class FimSchema:
    """Fill-in-the-middle: the model's special tokens, where they are not those of a known family; null: the family's.

    Args:
        prefix: token before the text in front of the gap.
        suffix: token before the text behind the gap.
        middle: token before what fills the gap; null where the prefix comes last.
        suffix_first: the suffix comes before the prefix.
        file: token before another file.
        ends: tokens that end the filling, beside the model's EOS.
    """

    prefix: str | None = None
    suffix: str | None = None
    middle: str | None = None
    suffix_first: bool = False
    file: str | None = None
    ends: list[str] = field(default_factory=list)


@dataclass
class ServeConfig(Common):
    """The keys of launch.serve. The comments are in conf/serve.yaml."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)  # not in a traceback or a log
    metrics_key: bool = False
    models_key: bool = True
    served_name: Any = None  # text, a list of text, or null
    chat_template: str | None = None
    max_sequences: int = 8
    max_waiting: int = 64
    cache_tokens: int | None = None
    prefill_chunk: int = 128
    max_body_bytes: int = 4 << 20
    timeout_s: float = 600.0
    drain_s: int = 30
    journal: str | None = None
    fim: FimSchema = field(default_factory=FimSchema)
    reasoning: Any = None  # "auto", two texts, or null
    generation_config: str = "auto"


@dataclass
class ScaleSchema:
    """How a shape is scaled down.

    Args:
        layers: how many layers to keep; null: all.
        divide: every width divided by this, except the head dimension.
    """

    layers: int | None = None
    divide: int = 1


@dataclass
class ProfileConfig(Common):
    """The keys of launch.profile. The comments are in conf/profile.yaml."""

    shape: ScaleSchema = field(default_factory=ScaleSchema)
    prefix: int = 1024
    tokens: list[int] = field(default_factory=list)
    R: int | None = None
    rank: int | None = None
    rounds: int = 9
    compare: bool = True
    plot: bool = True
    output: Output = Output.table


def mirror(config: type, name: str, values: Mapping[str, Any] | None = None) -> type:
    """An unfrozen dataclass with the fields of `config` and a `name`, which tells the decoders apart.

    An enum becomes a str: OmegaConf takes enums by member name, users know them by value. A field whose default is None
    may be null, whatever its type: the config fills it in. So may those of SHAPE_KEYS, which `frozen` leaves out then.

    Args:
        values: defaults other than the config's own; strings may be interpolations.
    """
    hints = get_type_hints(config)
    members: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for item in fields(config):
        assert item.default is not NO_DEFAULT, f"{config.__name__}.{item.name} needs a default to be mirrored"
        hint = hints[item.name]
        default = (values or {}).get(item.name, item.default)
        if isinstance(hint, type) and issubclass(hint, Enum):
            hint, default = str, str(default)
        nullable = item.default is None or item.name in SHAPE_KEYS
        members.append((item.name, hint | None if nullable else hint, field(default=default)))
    return make_dataclass(f"{config.__name__}Schema", members)


# The choices of two config groups; of the decoders, those that draft nothing.
UNDRAFTED: dict[str, type] = {"plain": PlainSchema, "autoregressive": AutoregressiveSchema}
SAMPLINGS: dict[str, type] = {"greedy": GreedySchema, "sample": mirror(SamplingParams, "sample")}


@dataclass(frozen=True)
class DecoderChoice:
    """One choice of the config group `decoder`.

    Attributes:
        config: the class of its config.
        values: fields that this choice sets otherwise than the config's defaults.
    """

    config: Any
    values: Mapping[str, Any] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the config has a field of this name."""
        return name in {item.name for item in fields(self.config)}

    def schema(self, name: str) -> type:
        """What Hydra merges into: W, N, G and the pool's settings are those at the top level."""
        keys = {field_name: key for field_name, key in (SHAPE_KEYS | POOL_KEYS).items() if self.has(field_name)}
        return mirror(self.config, name, {**self.values, **{item: f"${{{key}}}" for item, key in keys.items()}})


def decoder_choices() -> dict[str, DecoderChoice]:
    """The config group `decoder` but for plain decoding: every draft source by its name, lookahead by its presets."""
    choices: dict[str, DecoderChoice] = {}
    for entry in sources():
        presets = LOOKAHEAD_PRESETS if entry.config is LookaheadConfig else {entry.name: {}}
        choices |= {name: DecoderChoice(entry.config, values) for name, values in presets.items()}
    return choices


def frozen(config: type[T], schema: Any) -> T:
    """Build the config that `schema` mirrors.

    Raises:
        ValueError: a value out of range, from the config itself.
    """
    values = {item.name: getattr(schema, item.name) for item in fields(config)}  # type: ignore[arg-type]
    return config(**{name: value for name, value in values.items() if value is not None or name not in SHAPE_KEYS})


def settings(cfg: DictConfig) -> Any:
    """The config of a job as the dataclass of its app, interpolations resolved.

    Raises:
        ValueError: a key that the schema does not know; Hydra's `+key=value` lets it in. Or the name of another choice
            of a group than the one whose keys these are.
        OmegaConfBaseException: a missing or unreadable value.
    """
    ranks = env_int("WORLD_SIZE", 1, low=1)
    for key in ("W", "G"):  # weak scaling: what a rank has stays the same however many there are
        if cfg[f"{key}_per_rank"] is not None:
            cfg[key] = cfg[f"{key}_per_rank"] * ranks
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Common)
    _refuse_extras(config, "")
    _refuse_other_names(config)
    return config


def unknown_key(key: str, schema: Any) -> str:
    """A line that refuses `key`, whose last part is no field of `schema`, and names the fields."""
    known = [item.name for item in fields(schema)]
    parent, _, name = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    hint = getattr(schema, "HINT", "")
    suggestion = closest(name, known, prefix) or ";"
    message = f"unknown config key {key!r}{suggestion} known here: {', '.join(known)}"
    return f"{message}; {hint}" if hint else message


def _refuse_other_names(config: Common) -> None:
    for group, choices in (("decoder", [*UNDRAFTED, *decoder_choices()]), ("sampling", [*SAMPLINGS])):
        node: Any = getattr(config, group)
        schema: Any = type(node)
        if not hasattr(schema, "__dataclass_fields__"):
            continue
        name, own = node.name, schema().name
        if name != own and name in choices:  # one that there is not is refused where it is looked up, with a list
            raise UserError(f"{group}.name is {name!r} with the settings of {group}={own}; choose with {group}={name}")


def _refuse_extras(node: Any, prefix: str) -> None:
    for key, value in vars(node).items():
        if key not in {item.name for item in fields(node)}:
            raise UserError(unknown_key(prefix + key, node))
        if is_dataclass(value):
            _refuse_extras(value, f"{prefix}{key}.")


def register() -> None:
    """Put the schemas where the defaults lists of conf/ find them, group `schema`; and what conf/ has no files for."""
    schemas = {
        "generate": Config,
        "chat": ChatConfig,
        "serve": ServeConfig,
        "profile": ProfileConfig,
        "tune": TuneConfig,
        "benchmark": BenchmarkConfig,
        "scaling": ScalingConfig,
        "model": ModelSchema,
        "attention": AttentionSchema,
        "parallel": ParallelSchema,
        "task": TaskSchema,
        **SAMPLINGS,
    }
    decoders = {name: choice.schema(name) for name, choice in decoder_choices().items()}
    groups: dict[str, dict[str, Any]] = {
        "schema": schemas,
        "decoder": {**UNDRAFTED, **decoders},
        "attention": {name: AttentionSchema(name=name) for name in attention_choices()},
        "model": {name: ModelSchema(name=name, dtype="bfloat16") for name in SHAPES},
    }
    store = ConfigStore.instance()
    for group, nodes in groups.items():
        for name, node in nodes.items():
            if f"{name}.yaml" not in store.repo.get(group, {}):  # as an earlier run in this process leaves it
                store.store(group=group, name=name, node=node)
