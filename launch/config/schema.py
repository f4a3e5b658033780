"""Every key of the apps, once: a dataclass field gives its type and default, the field's entry under Args its text.

`--help` and docs/reference/config.md are made from these, and the files of conf/ repeat none of them: conf/APP.yaml
says which choices of the config groups the app begins with, and the files of a group set what is particular to a model,
a task or an experiment.

Hydra merges YAML into a schema, which a frozen dataclass does not allow. So the schemas of the decoders are unfrozen
mirrors of lp's own configs, and `frozen` builds the real config, whose `__post_init__` checks the values. The config
groups `decoder` and `sampling` have no files: they are made from the registered draft sources and from SamplingParams.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum, StrEnum
from typing import Any, ClassVar, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import II, MISSING, DictConfig, OmegaConf

from lp.attention.registry import attention_choices
from lp.config import DEFAULT_TIMEOUT_S, FIXED_SHAPE, LookaheadConfig
from lp.draft.registry import sources
from lp.errors import UserError
from lp.removed_keys import removal
from lp.sampling.params import SamplingParams

from ..data.shapes import SHAPES
from .arguments import closest

T = TypeVar("T")
# Fields that a draft source's config takes from keys of the app, where it has them. A key that is null is the config's
# own default.
SHAPE_KEYS = {"window_size": "W", "ngram_size": "N", "guess_set_size": "G"}
POOL_KEYS = {f"pool_{name}": f"pool.{name}" for name in ("scope", "mib", "file", "model_ngrams")}
POOL_KEYS |= {"history": "pool.history", "corpora": "pool.corpora"}
LOOKAHEAD_PRESETS = {"lookahead_auto": {"adaptive": True}, "lookahead": {"adaptive": False}}  # of one config


class Output(StrEnum):
    """What an app prints at its end: a table or a JSON object; users type these names."""

    table = "table"
    json = "json"


class TextOutput(StrEnum):
    """What an app that generates texts prints: text and a table, text alone, or JSON; users type these names."""

    table = "table"
    text = "text"
    json = "json"


@dataclass
class ModelSchema:
    """The model, as lp.load takes it.

    Args:
        name: "demo", a folder with config.json, a GGUF file, or a name on the hub.
        dtype: dtype of the weights: float64, float32, bfloat16, float16, or auto for what the checkpoint says.
        kv_dtype: what the cache holds keys and values as: int8 or fp8, one byte a value with a scale for each head and
            token, or auto for the dtype of the weights.
        device: this rank's device: cpu, cuda, cuda:<number>, or auto for its GPU if there is one.
        trust_remote_code: run code that comes with the checkpoint.
    """

    name: str = MISSING
    dtype: str = "float32"
    kv_dtype: str = "auto"
    device: str = "auto"
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
    """Keys of sampling=greedy: none, as greedy decoding has nothing to set."""

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
        tp: ranks that hold one copy of the model between them (tensor parallelism), where it is too large or too slow
            for one; the ranks are divided into such replicas, which share the steps.
        one_shot_sums: sum small tensors of such ranks in one kernel, by torch's symmetric memory, where it gives NCCL's
            sums (alpha).
    """

    backend: str = "auto"
    nproc: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
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
    """Keys of decoder=plain: none, as plain decoding (one token a step) has nothing to set."""

    name: str = "plain"


@dataclass
class AutoregressiveSchema:
    """Keys of decoder=autoregressive: none, as transformers' own decoding, which others are compared with, has none."""

    name: str = "autoregressive"


@dataclass
class PoolSchema:
    """How long the n-gram pool lasts, and how large it grows.

    The pool keeps n-grams of texts and files. Where the last tokens of a text are the beginning of such an n-gram, it
    drafts the rest of the n-gram.

    Args:
        scope: request, or session, with which it lasts from prompt to prompt.
        mib: most memory, MiB.
        file: with scope=session, a safetensors file that saves it from run to run.
        model_ngrams: a file of `lp ngrams`, with the tokens that the model writes most often after 1 to 3 given ones;
            auto: the one beside the model, if there is one; off: none.
        history: a file to which each generated text is added when it ends, with the end of its prompt; created if
            missing. Where the newest tokens of a later text occur in it, the pool drafts what followed there.
        corpora: files of `lp corpus`, at most 4, as [FILE]; read again if they have changed when a text begins. Where
            the newest tokens of a text occur in a corpus, the pool drafts what follows there.
    """

    scope: str = "request"
    mib: int = 16
    file: str | None = None
    model_ngrams: str = "auto"
    history: str | None = None
    corpora: list[str] = field(default_factory=list)


@dataclass
class Common:
    """Keys of all apps.

    Args:
        W: columns of the window, the paper's window_size, which ranks divide. With decoder=lookahead_auto it
            is the most columns that one rank computes in a step.
        N: tokens of an n-gram, the paper's ngram_size.
        G: a step has at most G x (N - 1) draft tokens, the paper's guess_set_size, which ranks divide and round up.
            With decoder=lookahead_auto that is the most that one rank computes. null: the decoder's own default, 184
            with lookahead_auto and 104 with lookahead.
        max_new_tokens: most tokens to add to a prompt.
        stop_strings: a text ends with the token that completes one of them.
        seed: the seed of sampling; null draws one, rank 0's for all.
        exact: what is equal to plain decoding: tokens (except where rounding decides), or bitwise (every bit of the
            logits); auto means tokens.
    """

    model: ModelSchema = field(default_factory=ModelSchema)
    decoder: Any = None
    attention: AttentionSchema = field(default_factory=AttentionSchema)
    sampling: Any = None
    parallel: ParallelSchema = field(default_factory=ParallelSchema)
    pool: PoolSchema = field(default_factory=PoolSchema)
    W: int = FIXED_SHAPE["window_size"]
    N: int = FIXED_SHAPE["ngram_size"]
    G: int | None = None
    max_new_tokens: int = 128
    stop_strings: list[str] = field(default_factory=list)
    seed: int | None = 0
    exact: str = "auto"


@dataclass
class Tasked(Common):
    """Keys of apps that continue the prompts of a task.

    Args:
        prompt: the text to continue; --prompt TEXT sets it, and needs no quoting for Hydra.
        prompt_file: a file with the text to continue.
        limit: without a prompt and a prompt_file, how many prompts of the task to take, the first of them; null: all.
        repeats: how often everything is measured; medians count.
    """

    task: TaskSchema = field(default_factory=TaskSchema)
    prompt: str | None = II("oc.env:LP_PROMPT,null")
    prompt_file: str | None = None
    limit: int | None = 4
    repeats: int = 1


@dataclass
class Texts(Common):
    """Keys of apps that show texts.

    Args:
        json_schema: a file with a JSON schema, which every text follows (extra `grammar`); lp generate keeps no journal
            of such texts.
        generation_config: whether the checkpoint's generation_config.json is followed: auto or none. With auto its
            penalties, suppressed tokens and the like hold; where it samples, so do texts, under `seed`, unless
            sampling=sample or a chat's /set temperature=0 says otherwise.
    """

    json_schema: str | None = None
    generation_config: str = "auto"


@dataclass
class Config(Tasked, Texts):
    """Keys of lp generate.

    Args:
        repeats: with compare=true, how often each is measured; medians count, and the table has least and most.
        output: what stdout has: with table the text, then a table; with text the text alone; with json one JSON object
            on the last line. Everything else then goes to stderr.
        stream: show the text as it comes, accepted tokens in colour.
        compare: once the texts are there, measure lookahead, plain decoding and prompt lookup in alternation, and
            compare their tokens with those of decoder=autoregressive, which shares no code with them. It takes several
            times as long as the texts.
        journal: a file to which every generated token is written, so that the same run, started again, continues its
            texts. null: none is written, except that ranks which torchrun may restart use journal.jsonl in the run's
            folder.
        verbose: print after every prompt how many tokens its steps took, and why.
    """

    max_new_tokens: int = 64
    repeats: int = 3
    output: TextOutput = TextOutput.table
    stream: bool = True
    compare: bool = False
    journal: str | None = None
    verbose: bool = False


@dataclass
class BenchmarkConfig(Tasked):
    """Keys of lp benchmark.

    Args:
        repeats: how often each method runs on a prompt; medians count, and from two on the table has least and most.
        output: with json stdout is one JSON object instead of the table.
        methods: what to run on every prompt, in alternation: decoders, and the baselines hf_generate, hf_static,
            hf_prompt_lookup, hf_assisted (which needs draft=<model>), llama_cpp and llama_cpp_prompt_lookup (which need
            gguf=<file>), deepspeed_tp, transformers_tp and accelerate_pp. Behind one of ours @1 runs it on rank 0
            alone. null: the decoder, plain decoding and prompt lookup. Where plain or autoregressive is among them, all
            tokens are compared with those of autoregressive, which shares no code with the others; unless named, it is
            not timed.
        draft: the model that drafts for hf_assisted: a folder, a name on the hub, or demo.
        gguf: the model as a GGUF file, for llama_cpp and llama_cpp_prompt_lookup.
        prompt_tokens: length to which prompts are brought, in tokens: shorter ones are preceded by the prompts before
            them in the task. null: prompts keep their own length.
        quality: measure perplexity, repetition and ROUGE of every text too.
        pass_at_1: pass@1 of every method: programs that the model writes are run against the task's tests, in a child
            process with limits; final numbers are compared. For humaneval, mbpp, classeval, gsm8k, whose data has to
            have the tests.
        out: the folder of the records; a run that finds records of its own settings there measures only what is
            missing. null: a new folder for this run.
    """

    limit: int | None = None
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
    """A link between ranks, for projections: an all-gather takes base + (R - 1) x (hop + bytes of a rank / bandwidth).

    Args:
        base_us: microseconds that any collective takes.
        hop_us: microseconds that each rank after the first adds.
        gb_s: bandwidth of the link, GB a second.
        source: where the figures are from, as a table's note shows it.
    """

    base_us: float = MISSING
    hop_us: float = MISSING
    gb_s: float = MISSING
    source: str = MISSING


def known_links() -> dict[str, LinkSchema]:
    """Links between GPUs or nodes by name, such as "nvlink", with speeds that are published or were measured."""
    tuning = "NCCL src/graph/tuning.cc: ring, LL protocol"
    return {
        "nvlink": LinkSchema(6.6, 0.6, 87.7, f"{tuning}, NVLINK; its LL bandwidth on Ampere"),
        "pcie": LinkSchema(
            6.6, 1.0, 16, f"{tuning}, PCI; PCIe 4.0 x16 at half its 32 GB/s, since LL sends a flag with every word"
        ),
        "infiniband": LinkSchema(6.6, 2.7, 12.5, f"{tuning}, NET; 200 Gbit/s at half of it, one device a node"),
        "gloo": LinkSchema(0, 532, 0.88, "measured: two processes of a busy machine of 2 x86-64 cores, torch 2.13.0"),
    }


@dataclass
class ScalingConfig(BenchmarkConfig):
    """Keys of lp scaling.

    Args:
        methods: what to run, as in lp benchmark; those that need several ranks, such as transformers_tp, are left out
            where there is one.
        ranks: world sizes to launch and measure, one after the other. If 1 is not among them, plain decoding runs on
            one rank too, as the baseline of speed-ups. A world size that fits on a node runs on node 0 alone; a larger
            one must be a multiple of a node's ranks. For several nodes, start the same command on each, with NNODES,
            RDZV_ENDPOINT, NPROC and the node's NODE_RANK in the environment; node 0 writes records and report.
        tp: how many of these ranks hold one copy of the model between them (tensor parallelism): every value that
            divides a world size is measured on it. ranks=[1,2,4] tp=[1,2,4] shows which split is fastest; vs plain is
            against the same tp.
        runs: measure and project so many times, and give every run's error of the projection and their median.
        project: run and time every rank's share of larger world sizes on this one device, and add the collective of
            each link.
        projected_ranks: world sizes to project.
        weak: beside the same W and G for all ranks together, project W and G for every rank.
        links: an all-gather over R ranks of n bytes each takes base_us + (R - 1) x (hop_us + n / gb_s).
    """

    limit: int | None = 4
    methods: list[str] | None = field(default_factory=lambda: ["lookahead", "lookahead_auto", "plain"])
    repeats: int = 3
    ranks: list[int] = field(default_factory=lambda: [1, 2])
    tp: list[int] = field(default_factory=lambda: [1])
    runs: int = 1
    project: bool = False
    projected_ranks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    weak: bool = True
    links: dict[str, LinkSchema] = field(default_factory=known_links)


@dataclass
class TuneConfig(Tasked):
    """Keys of lp tune. W, N, G and decoder are what it looks for; the pool is that of every setting.

    Args:
        repeats: rounds of every setting, in alternation.
        output: with json the last line of stdout is one JSON object, that of tune.json, and the table is left out.
    """

    max_new_tokens: int = 96
    output: Output = Output.table


@dataclass
class ChatConfig(Texts):
    """Keys of lp chat.

    Args:
        seed: the seed of sampling; null draws another one for every answer.
        system: the system prompt, before the first turn.
        history_file: a file of the lines typed in former chats, for the arrow keys; null: none.
    """

    max_new_tokens: int = 512
    seed: int | None = None
    system: str | None = None
    history_file: str | None = None


@dataclass
class FimSchema:
    """Fill-in-the-middle: the model's special tokens, where they are not those of a known family; null: the family's.

    Args:
        prefix: token that introduces the text before the gap.
        suffix: token that introduces the text after the gap.
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
class AnsweringConfig(Common):
    """Keys of apps that answer requests.

    Args:
        max_new_tokens: most tokens of a text whose request names no limit.
        seed: the seed of texts whose request gives none; null draws one for every text. `sampling` is what requests get
            that give no temperature.
        api_key: the server's key: clients must send it, as Authorization: Bearer KEY, and lp batch sends it to
            `servers`; null: there is none. In the environment it stays out of `ps`.
        served_name: the model's name in requests: one, or several, as in served_name='[a,b]'; answers have the first,
            and '*' among them takes any name. null: its own name, or the last part of it; ORG/NAME for a snapshot's
            folder in the hub's cache.
        adapters: folders of LoRA adapters that PEFT has saved, by name, as in adapters='{sql: /models/sql}': requests
            have each as a model of this name. null: there are none.
        chat_template: a file with a chat template (Jinja), in place of the model's own.
        max_sequences: texts that take steps together; further ones wait.
        cache_tokens: cache slots for all texts; null: half of the free memory, or what the longest texts need.
        prefill_chunk: most tokens of prompts that are read in a step, where other texts take part in it.
        max_body_bytes: largest body of a request.
        timeout_s: a request ends with an error after so many seconds; 0: never.
        drain_s: seconds that texts under way may take to finish after Ctrl-C or SIGTERM.
        journal: a folder that this process alone uses, for the tokens of texts under way. If a request comes again
            within a day after a restart, with its seed, its text continues after the tokens kept here. null: none are
            kept.
        reasoning: models that think first: the tokens around their reasoning, as in reasoning='[<think>,</think>]', or
            auto for those of known families. A chat's answer then has it apart, in reasoning_content, and a
            response_format begins after it. null: an answer is all text, and a response_format begins with it.
        generation_config: whether the checkpoint's generation_config.json fills in sampling fields that a request
            leaves out: auto (if the file asks for sampling, requests without a temperature are sampled as it says), or
            none.
    """

    max_new_tokens: int = 1024
    seed: int | None = None
    api_key: str | None = field(default=II("oc.env:LP_API_KEY,null"), repr=False)  # not in a traceback or a log
    served_name: Any = None  # text, a list of text, or null
    adapters: Any = None  # texts by name, or null
    chat_template: str | None = None
    max_sequences: int = 8
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
class ServeConfig(AnsweringConfig):
    """Keys of lp serve.

    Args:
        host: where rank 0 listens; 0.0.0.0 is every address of the machine, which wants an api_key.
        port: the port; 0 takes any free one, and says which.
        api_keys: a file with a line NAME KEY for each client; these keys are valid beside `api_key`. What is kept of a
            client's texts (pool.history, a session's pool, cached prefixes) is used for that client alone. A line that
            ends with corpora=A,B limits the client to these corpora. null: there are no named keys.
        metrics_key: whether /metrics needs the key too: scrapers rarely have one.
        models_key: whether the list of models needs the key: false lets a router's probes read it.
        max_waiting: texts that may wait; further ones are refused with 429.
        allow_image_urls: fetch images that a chat names by http or https; addresses of private networks never.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: str | None = None
    metrics_key: bool = False
    models_key: bool = True
    max_waiting: int = 64
    allow_image_urls: bool = False


@dataclass
class BatchConfig(AnsweringConfig):
    """Keys of lp batch.

    Args:
        input: the file of requests, in OpenAI's batch format; `lp batch IN OUT` and in=FILE name it too.
        out: the file of answers, one line for each request, in the order in which they end. If it has some answers
            already, the same command adds those that are missing.
        servers: addresses of servers that answer, as in servers=[http://a:8000,http://b:8000]; with an empty list the
            model in this process answers.
    """

    input: str = MISSING
    out: str = MISSING
    servers: list[str] = field(default_factory=list)


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
    """Keys of lp profile, which measures where the time of a decode step goes.

    model=<a shape>, such as codellama_7b, builds random weights: nothing is downloaded.

    Args:
        max_new_tokens: tokens of every decode.
        prefix: tokens in the KV cache.
        tokens: the sizes of forward pass to time, each a number of tokens in one pass.
        R: the number of ranks, of which this process runs one; under torchrun the launch's own (null).
        rank: the rank that this process runs; under torchrun its own (null).
        rounds: how often everything is measured; medians count.
        compare: measure tokens a second against transformers' generate.
        plot: write a picture to the run's folder.
        output: with json the last line of stdout is one JSON object.
    """

    max_new_tokens: int = 32
    shape: ScaleSchema = field(default_factory=ScaleSchema)
    prefix: int = 1024
    tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128])
    R: int | None = None
    rank: int | None = None
    rounds: int = 9
    compare: bool = True
    plot: bool = True
    output: Output = Output.table


def mirror(config: type, name: str, values: Mapping[str, Any] | None = None, without: Container[str] = ()) -> type:
    """Make an unfrozen dataclass from a frozen config, so that Hydra can merge YAML into it.

    It has the config's fields, and a field `name` that says which choice of the config group it is. Enums become
    strings, because OmegaConf takes an enum by member name while users know it by value.

    Args:
        config: a frozen dataclass of lp, such as LookaheadConfig.
        name: default of the added field `name`.
        values: defaults other than the config's own, by field; strings may be OmegaConf interpolations.
        without: fields to leave out, as other keys set them, or only Python does.
    """
    hints = get_type_hints(config)
    members: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for item in fields(config):
        if item.name in without:
            continue
        assert item.default is not NO_DEFAULT, f"{config.__name__}.{item.name} needs a default to be mirrored"
        hint = hints[item.name]
        default = (values or {}).get(item.name, item.default)
        if isinstance(hint, type) and issubclass(hint, Enum):
            hint, default = str, str(default)
        members.append((item.name, hint | None if item.default is None else hint, field(default=default)))
    return make_dataclass(f"{config.__name__}Schema", members)


# The choices of two config groups; of the decoders, those that draft nothing.
UNDRAFTED: dict[str, type] = {"plain": PlainSchema, "autoregressive": AutoregressiveSchema}
SAMPLINGS: dict[str, type] = {"greedy": GreedySchema, "sample": mirror(SamplingParams, "sample", without=["seed"])}

# Fields of draft sources' configs that have no key.
PYTHON_ALONE = ("ablation", "warmup_steps", "max_spec_offset", "max_tree_depth", "min_token_prob")


@dataclass(frozen=True)
class DecoderChoice:
    """One choice of the config group `decoder`: a draft source (a way to draft tokens), or a preset of its settings.

    Attributes:
        config: class of the draft source's config.
        values: values of the fields that this choice sets, by name, such as adaptive=True for lookahead_auto.
    """

    config: Any
    values: Mapping[str, Any] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the config has a field of this name, such as "window_size"."""
        return name in {item.name for item in fields(self.config)}

    def schema(self, name: str) -> type:
        """Make the dataclass into which Hydra merges this decoder's own keys, below `decoder.`.

        Fields are left out if they are keys of the app (W, N, G, the n-gram pool), if this choice sets them, or if only
        Python sets them.

        Args:
            name: name of the choice, as in decoder=NAME.
        """
        return mirror(self.config, name, without={*SHAPE_KEYS, *POOL_KEYS, *self.values, *PYTHON_ALONE})


def decoder_choices() -> dict[str, DecoderChoice]:
    """All decoders that draft tokens, as choices of the config group `decoder`, by name.

    They are the registered draft sources, and presets of lookahead's settings.
    """
    choices: dict[str, DecoderChoice] = {}
    for entry in sources():
        presets = LOOKAHEAD_PRESETS if entry.config is LookaheadConfig else {entry.name: {}}
        choices |= {name: DecoderChoice(entry.config, values) for name, values in presets.items()}
    return choices


def frozen(config: type[T], schema: Any, **others: Any) -> T:
    """Build a frozen config from its unfrozen mirror, which Hydra has filled; the values are checked.

    Args:
        config: class of the frozen config.
        schema: the filled instance of the class that `mirror` made.
        others: values of fields that the mirror lacks.

    Raises:
        ValueError: a value out of range; the config itself raises this.
    """
    names = {item.name for item in fields(config)} & vars(schema).keys()  # type: ignore[arg-type]
    return config(**{name: getattr(schema, name) for name in names}, **others)


def settings(cfg: DictConfig) -> Any:
    """Turn a job's config, as Hydra composed it, into the dataclass of its app, with interpolations resolved.

    Args:
        cfg: the config as Hydra composed it.

    Raises:
        ValueError: a key that the app does not have, which Hydra's `+key=value` lets in; or the settings of one choice
            under the name of another, as with decoder=lookahead decoder.name=plain.
        OmegaConfBaseException: a missing or unreadable value.
    """
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Common)
    _refuse_extras(config, "")
    _refuse_other_names(config)
    return config


def unknown_key(key: str, schema: Any, config: Any = None) -> str:
    """The error message for a key that an app does not have: the key's replacement, or the keys that the app has.

    Args:
        key: the key with its group, such as "pool.size".
        schema: the dataclass that has no such field.
        config: the app's config, one of whose groups may have the key; None for a key with its group.
    """
    if told := removal(key):
        return told
    known = [item.name for item in fields(schema)]
    parent, _, name = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    hint = getattr(schema, "HINT", "")
    in_groups = "" if parent or config is None else _in_groups(name, known, config)
    suggestion = in_groups or closest(name, known, prefix) or ";"
    message = f"unknown config key {key!r}{suggestion} known here: {', '.join(known)}"
    return f"{message}; {hint}" if hint else message


def _in_groups(name: str, known: Sequence[str], config: Any) -> str:
    """The end of a message about a key that groups of the config have: "; did you mean 'model.dtype'?", or ""."""
    values: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else vars(config)
    groups = {group: _names(values.get(group)) for group in known}
    found = [f"{group}.{name}" for group, names in groups.items() if name in names]
    if name == "name":  # these two are chosen with decoder= and sampling=
        found = [key for key in found if key not in ("decoder.name", "sampling.name")]
    told = " or ".join(map(repr, found))
    if groups.get("sampling") and not found and name in {item.name for item in fields(SAMPLINGS["sample"])}:
        told = f"'sampling.{name}', with sampling=sample"
    return f"; did you mean {told}?" if told else ""


def _names(group: Any) -> list[str]:
    """The keys of a group of a config; none where the value is no group."""
    if isinstance(group, dict):
        return [str(key) for key in group]
    return list(vars(group)) if is_dataclass(group) else []


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
            raise UserError(unknown_key(prefix + key, node, None if prefix else node))
        if is_dataclass(value):
            _refuse_extras(value, f"{prefix}{key}.")


def register() -> None:
    """Register in Hydra the configs that have no file in conf/: apps' keys, decoders, samplings and model shapes."""
    schemas = {
        "generate": Config,
        "chat": ChatConfig,
        "serve": ServeConfig,
        "batch": BatchConfig,
        "profile": ProfileConfig,
        "tune": TuneConfig,
        "benchmark": BenchmarkConfig,
        "scaling": ScalingConfig,
        "model": ModelSchema,
        "attention": AttentionSchema,
        "task": TaskSchema,
    }
    decoders = {name: choice.schema(name) for name, choice in decoder_choices().items()}
    groups: dict[str, dict[str, Any]] = {
        "schema": schemas,
        "decoder": {**UNDRAFTED, **decoders},
        "sampling": dict(SAMPLINGS),
        "attention": {name: AttentionSchema(name=name) for name in attention_choices()},
        "model": {name: ModelSchema(name=name, dtype="bfloat16") for name in SHAPES},
    }
    store = ConfigStore.instance()
    for group, nodes in groups.items():
        for name, node in nodes.items():
            if f"{name}.yaml" not in store.repo.get(group, {}):  # as an earlier run in this process leaves it
                store.store(group=group, name=name, node=node)
