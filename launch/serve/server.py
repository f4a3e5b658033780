"""The app: from a config to a server that runs until it is asked to end."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lp
from lp.checks import as_float, check_int
from lp.commands import install_command
from lp.engine.engine import MOST_SEQUENCES
from lp.engine.inputs import eos_ids
from lp.engine.interrupts import Terminated, sigterm_raises
from lp.engine.journal import model_name, resumable
from lp.engine.step_decoder import StepDecoder
from lp.errors import UserError
from lp.models.loader import Loaded, vocabulary_size
from lp.optional import is_installed
from lp.sampling.params import Verifier
from lp.waits import waiting

from ..config.builders import ORACLE, PLAIN, decoder_builders
from ..config.sampling import describe_sampling, sampling_of
from ..config.schema import ServeConfig
from ..data.prompts import read_text
from ..running.once import rank
from ..running.session import check_common, open_model, say_how_it_runs
from .engine_loop import EngineLoop
from .fim import FimFormat, FimPrompts, fim_format, given_format
from .grammars import Grammars
from .names import served_names
from .reasoning import reasoning_block, reasoning_names
from .unfinished import UnfinishedRequests, only_server, unfinished_folder

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra
FAILURE_SHOWN_S = 2.0  # after the engine has failed, /health says so as long
WARM_UP_TOKENS = 8
# An idle connection stays open for longer than clients keep theirs (httpx 5 s, load balancers 60 s): a request that is
# sent while the server closes the connection is lost.
KEEP_ALIVE_S = 75


def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP until the process is asked to end.

    Raises:
        Terminated: Ctrl-C or SIGTERM came, and the texts have ended.
        ValueError: a user error.
    """
    try:
        with sigterm_raises():
            _serve(config)
    except KeyboardInterrupt:  # how a server ends is no failure, after which torchrun would start it again
        raise Terminated from None


def _serve(config: ServeConfig) -> None:
    check(config)
    sampling = sampling_of(config)
    if sampling and sampling.verifier is Verifier.REJECTION:
        raise UserError("sampling.verifier is 'rejection', whose texts no seed repeats; use sampling.verifier=coupled")
    fim = given_format(dataclasses.asdict(config.fim))
    builders = decoder_builders(config, [config.decoder.name])
    template = None if config.chat_template is None else read_text(config.chat_template, "chat_template")
    with ExitStack() as held:
        bound = None
        if rank() == 0:  # first: loading takes long
            bound = held.enter_context(bind(config.host, config.port))
            if config.journal:
                held.enter_context(only_server(Path(config.journal), "journal"))
        context, loaded = open_model(config)
        say_how_it_runs(context, loaded)
        if template is not None:
            loaded.tokenizer.chat_template = template
        decoder = builders[config.decoder.name](loaded.model, context)
        assert isinstance(decoder, StepDecoder)
        decoder.follows = config.generation_config
        engine = lp.Engine(decoder, config.max_sequences, config.cache_tokens, config.prefill_chunk)
        with waiting("warming up, so that no client waits for what a first run does once"):
            warm_up(engine)
        grammars = Grammars(loaded.tokenizer, vocabulary_size(loaded.model))
        model = resumed_model(loaded, context, decoder.checkpoint().says) if config.journal else None
        if bound:
            listen(config, bound, loaded, engine, grammars, sampling, fim, unfinished_requests(config, model))
        else:
            follow(engine, grammars)


def check(config: ServeConfig) -> None:
    """Refuse what no server can use, before the model is loaded.

    Raises:
        ValueError: the key, the limit and the remedy; or which packages are missing.
    """
    missing = [package for package in PACKAGES if not is_installed(package)]
    if missing:
        raise UserError(f"lp serve needs {', '.join(missing)}; install the extra: {install_command('serve')}")
    check_common(config)
    if config.decoder.name == ORACLE:
        raise UserError(f"decoder={ORACLE} computes one text at a time; take decoder={PLAIN} instead")
    served_names(config.served_name)
    reasoning_names(config.reasoning)
    check_int("port", config.port, 0, 65535, "0 takes any free one")
    check_int("max_sequences", config.max_sequences, 1, MOST_SEQUENCES, "try 8")
    check_int("max_waiting", config.max_waiting, 0, float("inf"), "0 refuses what can't begin at once")
    check_int("max_body_bytes", config.max_body_bytes, 1, float("inf"), "try 4194304")
    check_int("drain_s", config.drain_s, 0, float("inf"), "0 ends texts at once")
    if (timeout_s := as_float(config.timeout_s)) is None or timeout_s < 0:
        raise UserError(f"timeout_s is {config.timeout_s!r}; it must be a number >= 0; 0 is no limit")
    if config.api_key is not None and not (config.api_key and config.api_key.isascii()):
        raise UserError("api_key is empty or has other characters than ASCII's; give a key, or api_key=null")


def warm_up(engine: lp.Engine) -> None:
    """A short text, so that the first client waits for nothing to be compiled."""
    engine.submit([0], WARM_UP_TOKENS, eos_token_id=())
    engine.submit([0, 0], WARM_UP_TOKENS, lp.SamplingParams(seed=0), eos_token_id=())
    while engine.step():
        pass
    engine.clear_prefixes()


def follow(engine: lp.Engine, grammars: Grammars) -> None:
    """Take rank 0's steps on another rank, until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # when to end is rank 0's affair
    loop = EngineLoop(engine, grammars, 0)
    loop.run()
    if loop.failure:
        raise loop.failure


def listen(
    config: ServeConfig,
    bound: socket.socket,
    loaded: Loaded,
    engine: lp.Engine,
    grammars: Grammars,
    sampling: lp.SamplingParams | None,
    fim: FimFormat | None,
    unfinished: UnfinishedRequests,
) -> None:
    """Answer requests, on rank 0, until the process is asked to end.

    Raises:
        KeyboardInterrupt: it was.
    """
    import uvicorn

    from .api import build_app
    from .draining import DrainingServer
    from .metrics import Metrics
    from .served import Limits, Served

    failed = threading.Event()
    loop = EngineLoop(engine, grammars, config.max_waiting, failed.set)
    known = fim_format(loaded.tokenizer, fim)
    served = Served(
        name=config.model.name,
        served_as=served_names(config.served_name),
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        loop=loop,
        sampling=sampling,
        stop=list(config.stop_strings),
        limits=Limits(max_new_tokens=config.max_new_tokens, timeout_s=config.timeout_s),
        metrics=Metrics(loop),
        unfinished=unfinished,
        fim=FimPrompts(loaded.tokenizer, known) if known else None,
        reasoning=reasoning_block(loaded.tokenizer, config.reasoning),
    )
    keys = config.metrics_key, config.models_key
    app = build_app(served, config.api_key, config.max_body_bytes, config.host, *keys)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
    server = DrainingServer(settings, loop, config.drain_s)
    watcher = threading.Thread(target=_end_after_failure, args=(failed, server), daemon=True)
    watcher.start()
    try:
        loop.start()
        bound.listen()  # who comes before uvicorn has started waits
        _announce(config, bound, served.short_name, sampling)
        _report(unfinished.earlier)
        server.run(sockets=[bound])
    finally:
        loop.close()
    if loop.failure:
        raise loop.failure


def resumed_model(
    loaded: Loaded, context: lp.ParallelContext, said: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """What texts depend on besides their requests, alike on all ranks; None where they can't go on behind tokens."""
    if not resumable(loaded.model):
        if context.is_main:
            print("journal: texts of this model can't go on behind known tokens; seeds are kept", file=sys.stderr)
        return None
    named = [model_name(loaded.model, context), sorted(eos_ids(loaded.model, None))]
    return json.dumps([*named, repr(said)] if said else named)


def unfinished_requests(config: ServeConfig, model: str | None) -> UnfinishedRequests:
    """Notes of requests that have not ended: with tokens in the user's journal folder, else seeds alone in the run's.

    Raises:
        ValueError: the folder can't be made or read.
    """
    if config.journal:
        return UnfinishedRequests(Path(config.journal), model, "journal")
    return UnfinishedRequests(unfinished_folder())


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, which refuses connections until the server listens.

    Raises:
        ValueError: the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it sends events at once (TCP_NODELAY), not 40 ms later.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        remedy = "give another port=, or port=0 for any free one; host= is an address of this machine"
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}); {remedy}") from None
    return bound


def _announce(config: ServeConfig, bound: socket.socket, name: str, sampling: lp.SamplingParams | None) -> None:
    from .api import LOOPBACK

    host, port = bound.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(
        f"serving {name} ({config.decoder.name}, {describe_sampling(sampling)}) on {where}; Ctrl-C ends it", flush=True
    )
    if config.api_key is None and config.host not in LOOPBACK:
        print("warning: there is no api_key: whoever reaches this address can use the model", file=sys.stderr)


def _report(earlier: list[dict[str, Any]]) -> None:
    """The requests that a server before this one did not finish."""
    for request in earlier:
        facts = ", ".join(f"{name} {value}" for name, value in request.items() if name != "id" and value is not None)
        line = f"request {request['id']} ({facts})"
        if not line.isprintable():  # a file that somebody has changed must not steer the terminal
            line = repr(line)
        print(f"unfinished before the restart: {line}", file=sys.stderr)


def _end_after_failure(failed: threading.Event, server: Any) -> None:
    failed.wait()
    threading.Event().wait(FAILURE_SHOWN_S)
    server.should_exit = True
