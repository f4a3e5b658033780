"""Replicas of `lp serve` on Ray Serve: `serve run lp.launch.serve.ray:app model=hf model.name=... parallel.nproc=2`.

Arguments are the keys of `lp serve`, and three of Ray's: min_replicas, max_replicas and cpus. A replica is a Ray actor
that has the endpoints and runs rank 0. It starts and owns one actor for each of its other ranks, inside its own
placement group. The ranks find each other through a torch TCPStore that rank 0 creates at each start, on a free port.
If a rank ends, hangs or fails, the replica ends, and Ray starts another.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from ray import serve
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lp.checks import check_int
from lp.errors import RankLost, UserError

from ..config.arguments import quoted
from ..config.schema import ServeConfig, register, settings
from ..running.errors import explain
from ..running.hydra_app import CONF, import_plugins, register_resolvers
from .api import build_app
from .engine_loop import EngineLoop
from .named_keys import read_keys
from .server import FAILURE_SHOWN_S, check
from .start_up import open_engine, read_settings

HUNG_S = 60.0  # a turn of the engine that takes longer does not come any more
# Requests that a replica has, for each text that takes steps: further ones wait where any replica can take them.
AT_ONCE = 2


def app(args: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application that `serve run` and `serve deploy` start.

    Args:
        args: keys of `lp serve` by name, with parallel.nproc as the number of ranks of a replica. Three more are
            allowed: min_replicas and max_replicas, between which Ray scales (default 1), and cpus, the CPU cores of
            each rank (default 1). Each rank takes a GPU, or none with model.device=cpu.

    Raises:
        ValueError: a setting that cannot be used.
    """
    given = dict(args)
    low = _count("min_replicas", given.pop("min_replicas", 1), 0)
    high = _count("max_replicas", given.pop("max_replicas", max(low, 1)), max(low, 1))
    cpus = _count("cpus", given.pop("cpus", 1), 1)
    overrides = [f"{key}={_as_override(value)}" for key, value in given.items()]
    environment = {name: value for name, value in os.environ.items() if name.startswith("LP_")}
    config = read_config(overrides)
    ranks = config.parallel.nproc or 1
    resources = {"CPU": float(cpus), "GPU": float(config.model.device != "cpu")}
    options: dict[str, Any] = {}
    if ranks > 1:
        # On one node: messages between nodes would take longer than steps. placement_group_strategy: PACK in a file of
        # Ray's takes several.
        options |= {"placement_group_bundles": [resources] * ranks, "placement_group_strategy": "STRICT_PACK"}
    if low == high:
        options["num_replicas"] = high
    else:
        scaling = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": config.max_sequences}
        options["autoscaling_config"] = scaling
    deployment = serve.deployment(
        Replica,
        name="lp",
        ray_actor_options={"num_cpus": cpus, "num_gpus": resources["GPU"]},
        # No more than the replica takes: it would refuse what another one, or the proxy, has room for.
        max_ongoing_requests=min(AT_ONCE * config.max_sequences, config.max_sequences + config.max_waiting),
        max_queued_requests=config.max_waiting,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=config.drain_s,
        **options,
    )
    return deployment.bind(overrides, environment, ranks, resources)


def read_config(overrides: Sequence[str]) -> ServeConfig:
    """Compose the config of `lp serve` with overrides, and check that it can be used under Ray.

    Args:
        overrides: overrides of keys as Hydra reads them, such as "model.name=Qwen/Qwen3-8B".

    Raises:
        ValueError: a setting that cannot be used.
    """
    import_plugins()
    register()
    register_resolvers()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = settings(compose("serve", [*overrides]))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None
    assert isinstance(config, ServeConfig)
    if config.journal:
        raise UserError("journal is a folder of one process, and Ray starts several; leave it out")
    if (config.host, config.port) != (ServeConfig.host, ServeConfig.port):
        raise UserError("host and port are those of Ray's proxies; serve start --http-host --http-port sets them")
    if config.parallel.nproc is not None:
        check_int("parallel.nproc", config.parallel.nproc, 1, float("inf"), "or null, for one rank a replica")
    check(config)
    check_int("max_waiting", config.max_waiting, 1, float("inf"), "Ray's proxies have room for one at least")
    return config


@serve.ingress()
class Replica:
    """The Ray Serve deployment class: rank 0 of a replica, which answers its requests and starts its other ranks.

    Args:
        overrides: overrides of `lp serve`'s keys, as Hydra reads them.
        environment: the variables LP_* of the process that built the application, set here and in all ranks.
        ranks: number of ranks of the replica, this one included.
        resources: resources of each rank by Ray's names, such as {"CPU": 1.0, "GPU": 1.0}.
    """

    def __init__(
        self, overrides: list[str], environment: dict[str, str], ranks: int, resources: dict[str, float]
    ) -> None:
        self._failed = threading.Event()
        self._loop: EngineLoop | None = None
        # The port is the store's from its start on: no other process can take it before the ranks come.
        address = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        others = self._others = start_ranks(ranks, resources)  # kept: without a handle, Ray would end them
        nodes = [ray.get_runtime_context().get_node_id(), *ray.get([other.node.remote() for other in others])]
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        places = [environment | meeting | variables for variables in rank_variables(nodes)]
        threading.Thread(target=self._end_after_failure, daemon=True).start()
        if others:
            runs = [each.run.remote(overrides, place) for each, place in zip(others, places[1:], strict=True)]
            threading.Thread(target=self._watch, args=(runs,), daemon=True).start()
        os.environ.update(places[0])
        self._config = read_config(overrides)
        owners = ["", *read_keys(self._config.api_keys)]
        opened = open_engine(self._config, read_settings(self._config), owners)
        self._loop = EngineLoop(opened.engine, opened.grammars, self._config.max_waiting, self._failed.set)
        self._served = opened.served(self._config, self._loop, self._config.allow_image_urls)
        self._loop.start()

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI app with the endpoints, for Ray's proxies; it takes requests with any Host header."""
        config = self._config
        keys = config.metrics_key, config.models_key, read_keys(config.api_keys)
        return build_app(self._served, config.api_key, config.max_body_bytes, "0.0.0.0", *keys)

    def check_health(self) -> None:
        """Tell Ray, which calls this periodically, whether the replica works.

        Raises:
            RuntimeError: the engine has failed, or a rank has hung for HUNG_S seconds. Ray then replaces the replica.
        """
        assert self._loop
        if self._loop.takes_texts and (silent_s := self._loop.silent_s()) > HUNG_S:
            self._loop.fail(RankLost(f"the engine, or a rank, has taken no turn for {silent_s:.0f} s"))
        if self._loop.failure:
            raise RuntimeError(f"the engine has failed: {self._loop.failure}")

    def __del__(self) -> None:
        """End all ranks; Ray calls this when it stops the replica, once its requests are answered."""
        if self._loop:
            self._loop.close(FAILURE_SHOWN_S)

    def _watch(self, runs: list[Any]) -> None:
        """Wait until a rank ends; unless it was asked to, the replica has failed."""
        ended, _ = ray.wait(runs)
        rank = runs.index(ended[0]) + 1
        if self._loop and not (self._loop.takes_texts or self._loop.failure):  # it was asked to
            return
        try:
            ray.get(ended)
            why = "it was not asked to"
        except Exception as error:
            why = str(error).strip().splitlines()[-1]
        print(f"rank {rank} has ended: {why}", file=sys.stderr, flush=True)
        if self._loop:
            self._loop.fail(RankLost(f"rank {rank} has ended: {why}"))
        self._failed.set()

    def _end_after_failure(self) -> None:
        """End the process, and with it its ranks, once clients have been told."""
        self._failed.wait()
        time.sleep(FAILURE_SHOWN_S)
        os._exit(1)


class Rank:
    """A Ray actor for one rank of a replica, other than rank 0; it takes part in rank 0's decode steps."""

    def node(self) -> str:
        """Ray's id of the node that this actor runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, overrides: list[str], environment: dict[str, str]) -> None:
        """Load the model and take part in rank 0's decode steps, until rank 0 ends.

        Args:
            overrides: overrides of `lp serve`'s keys, as Hydra reads them.
            environment: environment variables to set first, including RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            BaseException: the error that the engine failed with.
        """
        os.environ.update(environment)
        config = read_config(overrides)
        opened = open_engine(config, read_settings(config))
        loop = EngineLoop(opened.engine, opened.grammars, 0)
        loop.run()
        if loop.failure:
            raise loop.failure


def start_ranks(ranks: int, resources: Mapping[str, float]) -> list[Any]:
    """Start a Ray actor for each rank but rank 0; rank 0 calls this.

    Args:
        ranks: number of ranks of the replica, rank 0 included.
        resources: resources of each rank by Ray's names, "CPU" and "GPU".

    Returns:
        Handles of the actors in the order of ranks. Rank r is in bundle r of this replica's placement group.
    """
    group: PlacementGroup | None = ray.util.get_current_placement_group()
    return [
        ray.remote(Rank)
        .options(
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote()
        for rank in range(1, ranks)
    ]


def rank_variables(nodes: Sequence[str]) -> list[dict[str, str]]:
    """The environment variables that torchrun would set for each rank: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE.

    Args:
        nodes: Ray's ids of the nodes that the ranks run on, one for each rank.

    Returns:
        One dict of variables for each rank.
    """
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
        }
        for rank, node in enumerate(nodes)
    ]


def _count(name: str, value: Any, low: int) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    return check_int(name, number, low, float("inf"), f"try {max(low, 1)}")


def _as_override(value: Any) -> str:
    """A value of Ray's command line or of its file, as Hydra reads it: a text is an override's value already."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return f"[{','.join(quoted(each) if isinstance(each, str) else _as_override(each) for each in value)}]"
    return json.dumps(value)
