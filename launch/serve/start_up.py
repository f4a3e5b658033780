"""Load a model by its config and make it ready to answer requests: the start of `lp serve` and of `lp batch`."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lp
from lp.checks import as_float, check_int
from lp.commands import install_command
from lp.config import KVDtype
from lp.engine.engine import MOST_SEQUENCES
from lp.engine.inputs import eos_ids
from lp.engine.journal import model_name, resumable
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.loader import Loaded, vocabulary_size
from lp.optional import is_installed
from lp.sampling.params import Verifier
from lp.waits import waiting

from ..config.builders import ORACLE, PLAIN, Builders, decoder_builders
from ..config.sampling import sampling_of
from ..config.schema import AnsweringConfig
from ..data.prompts import read_text
from ..running.once import rank
from ..running.session import check_common, open_model, say_how_it_runs
from ..text.image_prompts import ImagePrompts
from .adapters import adapter_folders, check_adapters, load_adapters
from .engine_loop import EngineLoop
from .fim import FimFormat, FimPrompts, fim_format, given_format
from .grammars import Grammars
from .image_urls import ImageUrls
from .names import ModelNames, served_names
from .reasoning import reasoning_block, reasoning_names
from .unfinished import UnfinishedRequests, only_server, unfinished_folder

if TYPE_CHECKING:
    from .served import Served  # whose packages are of an extra

WARM_UP_TOKENS = 8
SPARE_FILES = 256  # of those that a process may open: for clients, sockets among ranks, the model


def check_packages(app: str, packages: Sequence[str]) -> None:
    """Refuse to start an app that needs packages of the extra `serve` which are not installed.

    Args:
        app: name of the command, such as "serve" for `lp serve`.
        packages: names of the packages that it imports.

    Raises:
        ValueError: a package is missing; the message names it, and the command that installs it.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise UserError(f"lp {app} needs {', '.join(missing)}; install the extra: {install_command('serve')}")


def check_answering(config: AnsweringConfig) -> None:
    """Refuse settings that neither `lp serve` nor `lp batch` can use, before the model is loaded.

    Args:
        config: the config of either app.

    Raises:
        ValueError: a setting is refused; the message has its key, the limit and the remedy.
    """
    check_common(config)
    if config.decoder.name == ORACLE:
        raise UserError(f"decoder={ORACLE} computes one text at a time; take decoder={PLAIN} instead")
    adapters = adapter_folders(config.adapters)
    if adapters and config.parallel.tp > 1:
        raise UserError(
            f"adapters is given with parallel.tp={config.parallel.tp}; ranks that divide a model have no adapters: use "
            "parallel.tp=1"
        )
    check_adapters(adapters, ModelNames.of(config.model.name, served_names(config.served_name)).known)
    reasoning_names(config.reasoning)
    check_int("max_sequences", config.max_sequences, 1, MOST_SEQUENCES, "try 8")
    check_int("max_body_bytes", config.max_body_bytes, 1, float("inf"), "try 4194304")
    check_int("drain_s", config.drain_s, 0, float("inf"), "0 ends texts at once")
    if (timeout_s := as_float(config.timeout_s)) is None or timeout_s < 0:
        raise UserError(f"timeout_s is {config.timeout_s!r}; it must be a number >= 0; 0 is no limit")
    if config.api_key is not None and not (config.api_key and config.api_key.isascii()):
        raise UserError("api_key is empty or has other characters than ASCII's; give a key, or api_key=null")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a config that are read before the model is loaded, so that mistakes in them show at once.

    Args:
        sampling: sampling for requests that do not set it themselves; None: the checkpoint's, else greedy.
        fim: the fill-in-the-middle format from the keys fim.*; None: they are not set.
        builders: functions that build a decoder, by the decoder's name.
        template: the chat template that replaces the model's own; None: the model keeps its own.
    """

    sampling: lp.SamplingParams | None
    fim: FimFormat | None
    builders: Builders
    template: str | None


def read_settings(config: AnsweringConfig) -> Settings:
    """Read the settings that need no model from a config, and the chat template from its file.

    Args:
        config: the config of `lp serve` or `lp batch`.

    Raises:
        ValueError: a setting can't be used; the message has the remedy.
    """
    sampling = sampling_of(config)
    if sampling and sampling.verifier is Verifier.REJECTION:
        raise UserError("sampling.verifier is 'rejection', whose texts no seed repeats; use sampling.verifier=coupled")
    fim = given_format(dataclasses.asdict(config.fim))
    builders = decoder_builders(config, [config.decoder.name])
    template = None if config.chat_template is None else read_text(config.chat_template, "chat_template")
    return Settings(sampling=sampling, fim=fim, builders=builders, template=template)


@contextmanager
def own_journal(config: AnsweringConfig) -> Iterator[None]:
    """Lock the journal's folder against other processes, as a context manager.

    The journal (config key `journal`) keeps generated tokens of unfinished requests for after a restart. Nothing is
    locked if the key is null, or on other ranks than 0.

    Args:
        config: has the key `journal`.

    Raises:
        ValueError: the folder can't be made, or another process has locked it.
    """
    with only_server(Path(config.journal), "journal") if config.journal and rank() == 0 else nullcontext():
        yield


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready to answer requests, with its engine.

    Args:
        loaded: model and tokenizer.
        settings: settings that were read before the model was loaded.
        engine: generates the texts; it is warmed up.
        grammars: compiles the grammars that requests have.
        journal_model: digest of the model and its default sampling settings, from `resumed_model`. Tokens that a
            server kept of unfinished requests are only reused under the same digest. None: tokens are not kept.
        images: makes prompts with images; None on other ranks than 0.
    """

    loaded: Loaded
    settings: Settings
    engine: lp.Engine
    grammars: Grammars
    journal_model: str | None
    images: ImagePrompts | None

    def served(self, config: AnsweringConfig, loop: EngineLoop, allow_image_urls: bool = False) -> Served:
        """Create the object that all endpoints share, with the model, the engine and the settings.

        Args:
            config: has the names of the model, the limits and the journal's folder.
            loop: runs the engine.
            allow_image_urls: whether images are downloaded from addresses that requests name.

        Raises:
            ValueError: the journal's folder can't be read.
        """
        from .metrics import Metrics
        from .served import Limits, Served

        tokenizer, fim = self.loaded.tokenizer, fim_format(self.loaded.tokenizer, self.settings.fim)
        return Served(
            name=config.model.name,
            served_as=served_names(config.served_name),
            model=self.loaded.model,
            tokenizer=tokenizer,
            loop=loop,
            sampling=self.settings.sampling,
            stop=list(config.stop_strings),
            limits=Limits(max_new_tokens=config.max_new_tokens, timeout_s=config.timeout_s),
            metrics=Metrics(loop),
            unfinished=unfinished_requests(config, self.journal_model),
            fim=FimPrompts(tokenizer, fim) if fim else None,
            reasoning=reasoning_block(tokenizer, config.reasoning),
            images=self.images,
            adapters=tuple(adapter_folders(config.adapters)),
            image_urls=ImageUrls(allow_image_urls),
        )


def open_engine(config: AnsweringConfig, settings: Settings, owners: Sequence[str] = ("",)) -> Opened:
    """Join the other ranks, load the model, and create and warm up an engine for it.

    Args:
        config: the app's config.
        settings: the result of `read_settings`.
        owners: names of the clients; "" is the client without a name. The files with each client's earlier texts, a
            source of draft tokens, are opened now. The other ranks use rank 0's names.

    Raises:
        ValueError: a setting can't be used; the message has the remedy.
    """
    check_open_files(config, len(owners))
    context, loaded = open_model(config)
    say_how_it_runs(context, loaded)
    load_adapters(loaded.model, adapter_folders(config.adapters))
    images = None
    if context.is_main:
        images = ImagePrompts.of(config.model.name, loaded.model, loaded.tokenizer, config.model.trust_remote_code)
    if settings.template is not None:
        loaded.tokenizer.chat_template = settings.template
        if images and images.processor:
            images.processor.chat_template = settings.template
    decoder = settings.builders[config.decoder.name](loaded.model, context)
    assert isinstance(decoder, StepDecoder)
    decoder.follows = config.generation_config
    engine = lp.Engine(decoder, config.max_sequences, config.cache_tokens, config.prefill_chunk)
    if isinstance(decoder, lp.LookaheadDecoder):
        names = context.share_text(" ".join(owners), "telling the owners of texts") or ""
        with waiting("opening what is kept of texts", len(owners), "owners") as wait:
            for name in names.split(" "):
                decoder.open_for(name)
                wait.done += 1
    with waiting("warming up, so that no client waits for what a first run does once"):
        warm_up(engine)
    return Opened(
        loaded=loaded,
        settings=settings,
        engine=engine,
        grammars=Grammars(loaded.tokenizer, vocabulary_size(loaded.model)),
        journal_model=resumed_model(loaded, decoder) if config.journal else None,
        images=images,
    )


def check_open_files(config: AnsweringConfig, owners: int) -> None:
    """Refuse more clients than this process can open files for (ulimit -n): each client's history file stays open.

    Args:
        config: says whether there are history files (pool.history), and how many adapters.
        owners: number of clients, including the one without a name.

    Raises:
        ValueError: the files are too many; the message says how many are needed, and how many this process may open.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if config.pool.history is None or most == resource.RLIM_INFINITY:
        return
    adapters = len(adapter_folders(config.adapters))
    needed = owners * (1 + adapters) + SPARE_FILES
    if needed > most:
        others = f" and of their {adapters} adapters" if adapters else ""
        raise UserError(
            f"pool.history keeps a file open for each of {owners} owners{others}, and this process may open {most}, of "
            f"which {SPARE_FILES} are for clients; raise the limit (ulimit -n {needed}), name fewer keys in api_keys, "
            "or set pool.history=null"
        )


def warm_up(engine: lp.Engine) -> None:
    """Generate two short texts, one greedy and one sampled, so that the first client does not wait for compilation."""
    one = engine.submit([0], WARM_UP_TOKENS, eos_token_id=(), owner=None)
    other = engine.submit([0, 0], WARM_UP_TOKENS, lp.SamplingParams(seed=0), eos_token_id=(), owner=None)
    while engine.step():
        pass
    for handle in (one, other):
        handle.result()  # raises what it failed with


def follow(opened: Opened) -> None:
    """Run the engine on a rank other than 0: take part in rank 0's decode steps until rank 0 ends.

    Ctrl-C and SIGTERM are ignored, as rank 0 decides when to end.

    Args:
        opened: the model and the engine.

    Raises:
        BaseException: the error that the engine failed with.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # when to end is rank 0's affair
    loop = EngineLoop(opened.engine, opened.grammars, 0)
    loop.run()
    if loop.failure:
        raise loop.failure


def resumed_model(loaded: Loaded, decoder: StepDecoder) -> str | None:
    """Identify the model and the defaults that generated texts depend on, so that a journal's tokens fit this server.

    A journal keeps the generated tokens of unfinished requests. A server only reuses them if its identification equals
    that of the server that generated them. All ranks call this function together and get equal results.

    Args:
        loaded: model and tokenizer.
        decoder: the decoder, whose checkpoint defaults and KV cache dtype count, too.

    Returns:
        JSON of the weights' digests, the EOS ids, the checkpoint's defaults and the KV cache's dtype. None if a text of
        this model can't be resumed exactly.
    """
    context, said = decoder.context, decoder.checkpoint().says
    if not resumable(loaded.model):
        if context.is_main:
            print("journal: texts of this model can't go on behind known tokens; seeds are kept", file=sys.stderr)
        return None
    named = [model_name(loaded.model, context), sorted(eos_ids(loaded.model, None))]
    named += [repr(said)] if said else []
    named += [str(decoder.kv_dtype)] if decoder.kv_dtype is not KVDtype.AUTO else []
    return json.dumps(named)


def unfinished_requests(config: AnsweringConfig, model: str | None) -> UnfinishedRequests:
    """Open the folder with a file for each request that has not ended.

    If the config key `journal` names a folder, that folder is used, and the files also keep generated tokens. Otherwise
    the folder is inside LP_RUN_DIR, and its files keep no tokens; without torchrun's restarts there are no files at
    all.

    Args:
        config: has the key `journal`; null: no tokens are kept.
        model: identifies the model (`resumed_model`); None: no tokens are kept.

    Raises:
        ValueError: the folder can't be made or read.
    """
    if config.journal:
        return UnfinishedRequests(Path(config.journal), model, "journal")
    return UnfinishedRequests(unfinished_folder())


def report(earlier: list[dict[str, Any]]) -> None:
    """Print to stderr the requests that the previous server did not finish, one a line.

    Args:
        earlier: facts about each such request, from `UnfinishedRequests.earlier`.
    """
    for request in earlier:
        facts = ", ".join(f"{name} {value}" for name, value in request.items() if name != "id" and value is not None)
        line = f"request {request['id']} ({facts})"
        if not line.isprintable():  # a file that somebody has changed must not steer the terminal
            line = repr(line)
        print(f"unfinished before the restart: {line}", file=sys.stderr)
