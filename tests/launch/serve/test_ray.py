"""Replicas on a real Ray of this machine, whose resources are CPUs: their texts, their ends and their number.

`pip install 'ray[serve]'`. Deployments are made as `serve deploy` makes them of a file.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

import lp
from launch.serve.fim import FimFormat, FimPrompts
from lp.errors import UserError
from lp.models.loader import vocabulary_size
from tests.conftest import ROOT

for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
serve = pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")
psutil = pytest.importorskip("psutil", reason="the package psutil is not installed")

from tests.support.eventually import eventually  # noqa: E402

SETTINGS = {
    "model": "demo",
    "model.device": "cpu",
    "model.dtype": "float64",
    "decoder": "lookahead",
    "W": 5,
    "N": 3,
    "G": 4,
    "cache_tokens": 8192,
    "max_sequences": 4,
    "fim.prefix": "def",
    "fim.suffix": "class",
    "fim.middle": "return",
}
FIM = FimFormat(prefix="def", suffix="class", middle="return")
COUNT = 60
MANY = 200
NEW = 24
CLIENTS = 6
LONG = {"prompt": "import os\n", "max_tokens": 1200, "temperature": 0.8, "seed": 3, "stream": True, "ignore_eos": True}
PATTERN = "[a-c]{2,9}(, [0-9]{1,3}){3,12}"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS = [(CHATS, stream, set[str]()) for stream in (False, True)]
KINDS += [
    (COMPLETIONS, stream, form) for stream in (False, True) for form in (set[str](), {"suffix"}, {"response_format"})
]
RETRYABLE = (500, 503)
# Ray's own processes need a minute to start where others keep the cores busy, and its workers give way to all others.
SLOW_MACHINE = (
    ("RAY_worker_niceness", "0"),
    ("RAY_agent_register_timeout_ms", "120000"),
    ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "100"),
    ("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "100"),
)


class Answer(NamedTuple):
    """What came back.

    Attributes:
        status: HTTP's; 0 where the answer broke off.
        text: the text, or the error.
    """

    status: int
    text: str


class Site:
    """Ray, and what expects its texts.

    Args:
        url: where Ray's proxy answers.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.model, self.tokenizer = lp.load("demo", dtype="float64")
        self.decoder = lp.PlainDecoder(self.model)
        self.compiler = lp.GrammarCompiler(self.tokenizer, vocabulary_size(self.model))
        self.known: dict[int, str] = {}
        self.fim = FimPrompts(self.tokenizer, FIM)

    def deploy(self, args: dict[str, Any], deployment: dict[str, Any] | None = None) -> None:
        """Deploy as `serve deploy` does, and wait until it runs."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = {"name": "lp", "route_prefix": "/", "import_path": "launch.serve.ray:app", "args": args}
        application["deployments"] = [{"name": "lp", **(deployment or {})}]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
        assert eventually(lambda: serve.status().applications["lp"].status == "RUNNING", 600), serve.status()

    def running(self) -> int:
        """How many replicas run."""
        return int(serve.status().applications["lp"].deployments["lp"].replica_states.get("RUNNING", 0))

    def body(self, index: int) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request: every third a chat, every fourth of the others with a gap or a form."""
        asked = {"max_tokens": NEW, "temperature": 0.8 * (index % 5 > 0), "seed": index, "stream": index % 2 == 0}
        if index % 3 == 0:
            return "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": self.prompt(index)}]}
        if index // 2 % 4 == 1:  # streams and whole answers alike
            asked |= {"suffix": f"\n    return {index}\n"}
        elif index // 2 % 4 == 2:
            asked |= {"response_format": {"type": "regex", "regex": PATTERN}}
        return "/v1/completions", asked | {"prompt": self.prompt(index)}

    @staticmethod
    def prompt(index: int) -> str:
        return f"# {index}\ndef f_{index}(a, b):\n    "

    def expected(self, index: int) -> str:
        """The text of a request, by plain decoding in this process."""
        if index not in self.known:
            self.known[index] = self._decode(index)
        return self.known[index]

    def _decode(self, index: int) -> str:
        body = self.body(index)[1]
        ids = list(self.tokenizer(self.prompt(index))["input_ids"])
        options: dict[str, Any] = {}
        if "suffix" in body:
            ids, _ = self.fim.prompt(body["prompt"], body["suffix"], None)
            options["eos_token_id"] = [*lp.engine.inputs.eos_ids(self.model, None), *self.fim.ends]
        if "response_format" in body:
            options["grammar"] = self.compiler.regex(PATTERN)
        sampling = lp.SamplingParams(temperature=body["temperature"], seed=index)
        return self.decoded(self.decoder.generate(ids, NEW, sampling, **options).tokens)

    def decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Send a request and wait for the end of its answer."""
        try:
            with httpx.stream("POST", self.url + path, json=body, timeout=240) as answer:
                data = answer.read().decode()
        except httpx.TransportError as error:
            return Answer(0, repr(error))
        if answer.status_code != 200:
            return Answer(answer.status_code, data)
        if not body["stream"]:
            choice = json.loads(data)["choices"][0]
            return Answer(200, choice["message"]["content"] if "message" in choice else choice["text"])
        lines = [line[6:] for line in data.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        if "error" in events[-1]:
            return Answer(int(events[-1]["error"]["code"]), events[-1]["error"]["message"])
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices
        )
        return Answer(200 if lines[-1] == "[DONE]" else 0, text)

    def ask_all(self, count: int = COUNT) -> list[Answer]:
        """The answers to all requests, of clients that ask at once."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            return list(clients.map(lambda index: self.ask(*self.body(index)), range(count)))

    def assert_exact(self, answers: list[Answer]) -> None:
        """Compare the answers that came with the decoder's texts."""
        wrong = [
            (index, answer, self.expected(index))
            for index, answer in enumerate(answers)
            if answer.status == 200 and answer.text != self.expected(index)
        ]
        assert wrong == []

    def long_text(self) -> str:
        ids = list(self.tokenizer(LONG["prompt"])["input_ids"])
        sampling = lp.SamplingParams(temperature=0.8, seed=3)
        return self.decoded(self.decoder.generate(ids, LONG["max_tokens"], sampling, eos_token_id=()).tokens)


def processes_of(name: str) -> list[Any]:
    """Processes below this one that Ray runs an actor of this name in."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if title.startswith("ray::") and re.search(rf"\b{name}\b", title):
                found.append(process)
        except psutil.Error:  # gone meanwhile
            continue
    return found


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A Ray of this process, of which nothing is left behind."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in SLOW_MACHINE:
            patch.setenv(name, value)
        patch.delenv("OMP_NUM_THREADS", raising=False)  # Ray gives each actor as many as it has cores
        ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    children = []
    try:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):  # of the proxy, which comes later
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Site(f"http://127.0.0.1:{port}")
        children = psutil.Process().children(recursive=True)
        serve.shutdown()
    finally:
        ray.shutdown()
    assert children
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@pytest.mark.slow
def test_two_replicas(site: Site) -> None:
    """Texts are the decoder's whichever replica has them; one that is killed loses what it had, and is replaced."""
    site.deploy(SETTINGS | {"min_replicas": 2, "max_replicas": 2})
    assert eventually(lambda: site.running() == 2, 60)
    answers = site.ask_all(MANY)
    assert [answer for answer in answers if answer.status != 200] == [] and len(answers) == MANY
    site.assert_exact(answers)
    kinds = [
        (path, body["stream"], {*body} & {"suffix", "response_format"}) for path, body in map(site.body, range(MANY))
    ]
    assert all(kind in kinds for kind in KINDS)
    replicas = processes_of("ServeReplica")
    assert len(replicas) == 2 and all(cached_tokens(site) > 0 for _ in range(4))
    killer = threading.Timer(1.0, replicas[0].kill)
    killer.start()
    answers = site.ask_all()
    killer.join()
    lost = [answer for answer in answers if answer.status != 200]
    print(f"killed amid {COUNT} requests: lost {[answer.status for answer in lost]}")
    assert 0 < len(lost) <= CLIENTS and all(answer.status in (0, *RETRYABLE) for answer in lost)
    site.assert_exact(answers)
    assert eventually(lambda: len(set(processes_of("ServeReplica")) - {replicas[0]}) == 2 and site.running() == 2, 120)
    site.assert_exact(site.ask_all())


def cached_tokens(site: Site) -> float:
    """A counter of whichever replica answers."""
    lines = httpx.get(f"{site.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("lp_generated_tokens_total"))


@pytest.mark.slow
def test_a_rolling_update_drains(site: Site) -> None:
    """A text that is under way when another version comes is finished by the replica that has it."""
    site.deploy(SETTINGS)
    before = processes_of("ServeReplica")
    with ThreadPoolExecutor(1) as client:
        under_way = client.submit(site.ask, "/v1/completions", LONG)
        time.sleep(1)
        site.deploy(SETTINGS | {"max_new_tokens": 77, "drain_s": 120})
        answer = under_way.result()
    assert (answer.status, answer.text) == (200, site.long_text())
    assert eventually(lambda: not {*before} & {*processes_of("ServeReplica")}, 60)


@pytest.mark.slow
def test_two_ranks(site: Site) -> None:
    """Ranks of a replica give the decoder's texts; one that dies, and one that hangs, ends the replica for another."""
    site.deploy(SETTINGS | {"parallel.nproc": "2"}, {"health_check_period_s": 1})
    assert httpx.get(f"{site.url}/props", timeout=60).json()["ranks"] == 2
    answers = site.ask_all()
    assert [answer for answer in answers if answer.status != 200] == []
    site.assert_exact(answers)
    for number, most_s in ((signal.SIGKILL, 90), (signal.SIGSTOP, 90)):
        (rank,), (replica,) = processes_of("Rank"), processes_of("ServeReplica")
        with ThreadPoolExecutor(1) as client:
            under_way = client.submit(site.ask, "/v1/completions", LONG | {"stream": False})
            time.sleep(1)
            start = time.monotonic()
            rank.send_signal(number)
            answer = under_way.result()
        print(f"{number.name}: {answer.status} after {time.monotonic() - start:.1f} s: {answer.text[:200]}")
        said = "rank 1 has ended" if number == signal.SIGKILL else "has taken no turn"
        assert answer.status == 503 and said in answer.text
        assert eventually(lambda: site.ask(*site.body(1)).status == 200, most_s)
        print(f"{number.name}: replaced after {time.monotonic() - start:.1f} s")
        assert psutil.wait_procs([rank, replica], timeout=30)[1] == []
        site.assert_exact([Answer(200, site.expected(0)), site.ask(*site.body(1))])


@pytest.mark.slow
def test_scaling(site: Site) -> None:
    """More texts than one replica takes at a time bring another, which ends when they have."""
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2, "target_ongoing_requests": 2}
    site.deploy(SETTINGS, {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2, **quick}})
    assert site.running() == 1
    with ThreadPoolExecutor(CLIENTS) as clients:
        long = [clients.submit(site.ask, "/v1/completions", LONG) for _ in range(2 * CLIENTS)]
        assert eventually(lambda: site.running() == 2, 120)
        answers = [each.result() for each in long]
    assert {answer.status for answer in answers} == {200} and {answer.text for answer in answers} == {site.long_text()}
    assert eventually(lambda: site.running() == 1 and len(processes_of("ServeReplica")) == 1, 120)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"min_replicas": 3, "max_replicas": "2"}, "max_replicas is 2; it must be an integer >= 3"),
        ({"cpus": "half"}, "cpus is 'half'; it must be an integer >= 1"),
        ({"journal": "here"}, "journal is a folder of one process"),
        ({"max_waiting": 0}, "max_waiting is 0; it must be an integer >= 1"),
        ({"port": 9000}, "host and port are those of Ray's proxies"),
        ({"parallel.nproc": 0}, "parallel.nproc is 0"),
        ({"windw": 3}, "windw"),
        ({"max_sequences": [1, 2]}, "max_sequences"),
    ],
)
def test_settings_that_cannot_be_used(args: dict[str, Any], message: str) -> None:
    """They are refused where the application is built, not by a replica that starts again and again."""
    from launch.serve.ray import app

    with pytest.raises(UserError) as refused:
        app({"model": "demo", **args})
    assert message in str(refused.value)


def test_what_ray_is_told() -> None:
    """Resources of ranks and bounds of requests, of settings as a command line gives them."""
    from launch.serve.ray import app

    settings = {"model": "demo", "parallel.nproc": "4", "cpus": "2", "max_replicas": "3", "max_sequences": "5"}
    deployment = app(settings | {"max_waiting": "7"})._bound_deployment
    rank = {"CPU": 2.0, "GPU": 1.0}
    config = deployment._replica_config
    assert config.placement_group_bundles == [rank] * 4 and config.placement_group_strategy == "STRICT_PACK"
    assert {name: config.ray_actor_options[name] for name in ("num_cpus", "num_gpus")} == {"num_cpus": 2, "num_gpus": 1}
    limits = deployment._deployment_config
    assert (limits.max_ongoing_requests, limits.max_queued_requests) == (10, 7)
    few_wait = app(settings | {"max_waiting": "2"})._bound_deployment._deployment_config
    assert (few_wait.max_ongoing_requests, few_wait.max_queued_requests) == (7, 2), "a replica refuses the eighth"
    scaling = limits.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 5)


def test_the_file_of_the_guide() -> None:
    """Ray knows all names in it: others it ignores, and would start something else without a word."""
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    from launch.serve.ray import app

    yaml = pytest.importorskip("yaml", reason="the package PyYAML is not installed")
    page = (ROOT / "docs/guide/several-machines.md").read_text(encoding="utf-8")
    (application,) = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["applications"]
    ServeDeploySchema.model_validate({"applications": [application]})
    (deployment,) = application["deployments"]
    for given, schema in (
        (application, ServeApplicationSchema),
        (deployment, DeploymentSchema),
        (deployment["autoscaling_config"], AutoscalingConfig),
        (deployment["request_router_config"], RequestRouterConfig),
    ):
        assert {*given} <= {*schema.model_fields}
    assert deployment["name"] == app(application["args"])._bound_deployment.name


def test_lists_of_a_file() -> None:
    """Hydra reads no JSON: it would end texts at a backslash and an n, not at the end of a line."""
    from launch.serve.ray import app, read_config

    wanted = ["\n\n", "größer", "\\d", 'say "a"', "it's", "a,b]", "null", "x\\"]
    deployment = app({"model": "demo", "stop_strings": wanted, "sampling.temperature": 0.5, "api_key": None})
    config = read_config(deployment._bound_deployment.init_args[0])
    assert config.stop_strings == wanted and config.sampling.temperature == 0.5 and config.api_key is None


def test_variables_of_ranks() -> None:
    """Local ranks count on each node, by which torch would choose a device that is not there."""
    from launch.serve.ray import rank_variables

    places = rank_variables(["a", "b", "a", "b", "b"])
    assert [int(place["LOCAL_RANK"]) for place in places] == [0, 0, 1, 1, 2]
    assert [int(place["LOCAL_WORLD_SIZE"]) for place in places] == [2, 3, 2, 3, 3]
    assert {place["WORLD_SIZE"] for place in places} == {"5"}
