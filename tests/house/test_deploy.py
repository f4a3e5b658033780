"""deploy/: manifests that a cluster would take, an image that has what they start, and settings that fit each other.

Kubernetes' own resources are checked against its schemas (kubernetes-validate, pinned), custom ones against
tests/support/manifest_schemas.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from launch.cli import own_arguments
from launch.config.schema import ServeConfig, register, settings
from launch.running.hydra_app import CONF, register_resolvers
from tests.conftest import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

import jsonschema  # noqa: E402 - which kubernetes-validate needs

DEPLOY = ROOT / "deploy"
FILES = sorted(DEPLOY.glob("*.yaml"))
SCHEMAS = {
    schema["properties"]["apiVersion"]["const"] + schema["properties"]["kind"]["const"]: schema
    for schema in map(json.loads, (path.read_text() for path in (ROOT / "tests/support/manifest_schemas").iterdir()))
}
CUSTOM = [schema["properties"]["kind"]["const"] for schema in SCHEMAS.values()]
KUBERNETES = "1.34"  # preStop.sleep is no longer behind a switch; of the versions that the package has
SIGNALLED_S = 10  # for the last events and the end of the ranks, behind drain_s

Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def everything() -> list[Manifest]:
    return [each for path in FILES for each in manifests(path)]


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """The pod templates of a manifest."""
    spec = manifest.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    group = spec.get("leaderWorkerTemplate", {})
    yield from (group[name] for name in ("leaderTemplate", "workerTemplate") if name in group)


def errors(manifest: Manifest) -> list[str]:
    """What a cluster would refuse in a manifest, in words."""
    kind = f"{manifest.get('apiVersion')}{manifest.get('kind')}"
    found: list[str] = []
    if kind in SCHEMAS:
        found += [each.message for each in jsonschema.Draft202012Validator(SCHEMAS[kind]).iter_errors(manifest)]
        for pod in pods(manifest):
            metadata = {"name": "x", **pod.get("metadata", {})}
            found += core_errors({"apiVersion": "v1", "kind": "Pod", **pod, "metadata": metadata})
        return found
    return core_errors(manifest)


def core_errors(manifest: Manifest) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    except (kubernetes_validate.InvalidSchemaError, kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        return [f"no such resource: {error}"]
    return []


def servers() -> list[tuple[str, Manifest]]:
    """Every pod that runs our image, with its file."""
    found = []
    for path in FILES:
        for manifest in manifests(path):
            for pod in pods(manifest):
                if pod["spec"]["containers"][0]["args"][0] == "launch.serve":
                    found.append((path.name, pod))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_are_what_a_cluster_takes(path: Path) -> None:
    """A field that is misspelled is refused, or worse: dropped."""
    found = manifests(path)
    assert found and not [f"{each['kind']} {each['metadata']['name']}: {e}" for each in found for e in errors(each)]


BREAK: dict[str, Callable[[Manifest], Any]] = {
    "a misspelled field": lambda m: m["spec"].update(replica=1),
    "a misspelled field of a pod": lambda m: next(pods(m))["spec"].update(terminationGracePeriodSecond=1),
    "a wrong type": lambda m: next(pods(m))["spec"].update(terminationGracePeriodSeconds="2m"),
    "a probe of nothing": lambda m: container(m)["readinessProbe"]["httpGet"].pop("port"),
    "a misspelled probe": lambda m: container(m).update(readynessProbe={}),
    "a container without a name": lambda m: container(m).pop("name"),
    "another version": lambda m: m.update(apiVersion="apps/v2"),
    "another kind": lambda m: m.update(kind="Deploymnt"),
    "no spec": lambda m: of(m, *CUSTOM).pop("spec"),
    "a value that there is not": lambda m: m["spec"]["leaderWorkerTemplate"].update(restartPolicy="Always"),
    "a startup that there is not": lambda m: m["spec"].update(startupPolicy="LeaderFirst"),
    "no worker": lambda m: m["spec"]["leaderWorkerTemplate"].pop("workerTemplate"),
    "a port out of range": lambda m: m["spec"]["targetPorts"].append({"number": 80000}),
    "the field of an older release": lambda m: m["spec"].update(extensionRef=m["spec"].pop("endpointPickerRef")),
    "no selector": lambda m: of(m, "InferencePool", "Deployment")["spec"].pop("selector"),
    "a time that is none": lambda m: m["spec"]["rules"][0].update(timeouts={"request": "ten minutes"}),
    "a path without a slash": lambda m: m["spec"]["rules"][0]["matches"][0]["path"].update(value="v1"),
    "no class": lambda m: m["spec"].pop("gatewayClassName"),
    "a protocol that there is not": lambda m: m["spec"]["listeners"][0].update(protocol="http"),
}


def of(manifest: Manifest, *kinds: str) -> Manifest:
    """The manifest, if it is of one of these kinds: others may lack the field."""
    if manifest["kind"] not in kinds:
        raise KeyError
    return manifest


def container(manifest: Manifest) -> Any:
    return next(pods(manifest))["spec"]["containers"][0]


@pytest.mark.parametrize("fault", BREAK)
def test_a_broken_manifest_is_seen(fault: str) -> None:
    """The check above must not pass because it looks past a field: each fault, in every manifest that can have it."""
    tried = 0
    for manifest in everything():
        broken = copy.deepcopy(manifest)
        try:
            BREAK[fault](broken)
        except (KeyError, IndexError, StopIteration, TypeError, AttributeError):
            continue
        tried += 1
        assert errors(broken), f"{fault} in {manifest['kind']} {manifest['metadata']['name']}"
    assert tried


def test_pods_start_an_app_with_settings_that_it_has() -> None:
    """A key that was renamed would end every pod with exit code 2, on the nodes of whoever reads the page."""
    register()
    register_resolvers()
    assert len(servers()) == 3
    for name, pod in servers():
        app, *args = pod["spec"]["containers"][0]["args"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = settings(compose(app.removeprefix("launch."), own_arguments("serve", args)))
        assert isinstance(config, ServeConfig) and config.host == "0.0.0.0" and config.api_key is None, name
        nodes = 2 if name == "two-nodes.yaml" else 1
        assert int(environment(pod)["NPROC"]["value"]) * nodes % config.parallel.tp == 0
        stop = pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["spec"]["terminationGracePeriodSeconds"] >= stop + config.drain_s + SIGNALLED_S, name
        for port in pod["spec"]["containers"][0].get("ports", []):
            assert port["containerPort"] == config.port


def environment(pod: Manifest) -> dict[str, Any]:
    return {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}


def test_pods_have_what_ranks_need() -> None:
    """GPUs for all ranks, shared memory beyond 64 MiB, folders that can be written, and the key from a Secret."""
    for name, pod in servers():
        spec, first = pod["spec"], pod["spec"]["containers"][0]
        assert environment(pod)["NPROC"]["value"] == str(first["resources"]["limits"]["nvidia.com/gpu"]), name
        assert set(environment(pod)["LP_API_KEY"]["valueFrom"]["secretKeyRef"]) == {"name", "key"}
        mounted = {mount["mountPath"]: mount["name"] for mount in first["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(mounted.values()) == set(volumes)
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert first["securityContext"]["readOnlyRootFilesystem"] and {"/tmp", "/cache"} <= mounted.keys()
        model = next(arg for arg in first["args"] if arg.startswith("model.name="))
        assert model.startswith("model.name=/models/") and "/models" in mounted
    assert not [each for each in everything() if each["kind"] == "Secret"]
    assert "api_key=" not in "".join(path.read_text() for path in FILES)


def test_probes_ask_what_they_mean() -> None:
    """A server that drains must get no requests, and must not be killed for it."""
    asked = [pod["spec"]["containers"][0] for _, pod in servers()]
    listening = [each for each in asked if "ports" in each]
    assert len(listening) == 2
    for each in listening:
        assert each["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
        assert (
            each["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"} == each["startupProbe"]["httpGet"]
        )
        assert each["startupProbe"]["periodSeconds"] * each["startupProbe"]["failureThreshold"] >= 900
        assert [port["name"] for port in each["ports"]] == ["http"]
    assert not [each for each in asked if "ports" not in each and "readinessProbe" in each]


def test_a_rollout_waits_as_long_as_a_start_may_take() -> None:
    """`kubectl rollout status` would call a replica failed, after ten minutes, that still loads its model."""
    for each in everything():
        probe = container(each).get("startupProbe") if each["kind"] == "Deployment" else None
        if probe:
            start_s = probe["periodSeconds"] * probe["failureThreshold"]
            assert each["spec"].get("progressDeadlineSeconds", 600) > start_s


def test_ranks_of_two_nodes_find_each_other() -> None:
    """Both pods have the same command and the variables that torchrun.sh takes, of what the operator sets."""
    (group,) = (each for each in everything() if each["kind"] == "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert leader["spec"]["containers"][0]["args"] == worker["spec"]["containers"][0]["args"]
    assert leader["spec"]["terminationGracePeriodSeconds"] <= worker["spec"]["terminationGracePeriodSeconds"]
    script = (ROOT / "torchrun.sh").read_text(encoding="utf-8")
    for pod in (leader, worker):
        given = {name: each.get("value") for name, each in environment(pod).items()}
        assert given["NNODES"] == "$(LWS_GROUP_SIZE)" and given["NODE_RANK"] == "$(LWS_WORKER_INDEX)"
        assert re.fullmatch(r"\$\(LWS_LEADER_ADDRESS\):\d+", given["RDZV_ENDPOINT"])
        assert all(f"${{{name}:-" in script for name in ("NNODES", "NODE_RANK", "RDZV_ENDPOINT"))
    (service,) = (each for each in manifests(DEPLOY / "two-nodes.yaml") if each["kind"] == "Service")
    selector = service["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/name"] == group["metadata"]["name"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_a_group_of_pods_has_its_name_alone() -> None:
    """The operator makes a headless Service of a LeaderWorkerSet's name, unless there is one: then pods have no names
    of their own, and the worker never finds the leader."""
    services = {each["metadata"]["name"] for each in everything() if each["kind"] == "Service"}
    groups = [each["metadata"]["name"] for each in everything() if each["kind"] == "LeaderWorkerSet"]
    assert groups and services and services.isdisjoint(groups)


def test_what_is_named_is_there() -> None:
    """Selectors, ports, claims and references lead to something; one that does not is no error to a cluster."""
    found = everything()
    labels = [pod["metadata"]["labels"] for each in found for pod in pods(each)]
    names = {(each["kind"], each["metadata"]["name"]) for each in found}

    def selects(selector: Manifest) -> bool:
        own = {key: value for key, value in selector.items() if not key.startswith("leaderworkerset.")}
        return any(own.items() <= each.items() for each in labels)

    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "Deployment":
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        if each["kind"] == "Service":
            assert selects(spec["selector"])
            targets = {port["targetPort"] for port in spec["ports"]}
            ports = {port["name"] for one in found for pod in pods(one) for port in container_ports(pod)}
            assert targets <= ports
        if each["kind"] == "InferencePool":
            assert selects(spec["selector"]["matchLabels"])
            assert ("Service", spec["endpointPickerRef"]["name"]) in names
            assert {port["number"] for port in spec["targetPorts"]} == {8000}
        if each["kind"] == "HTTPRoute":
            assert all(("Gateway", ref["name"]) in names for ref in spec["parentRefs"])
            assert all((ref["kind"], ref["name"]) in names for rule in spec["rules"] for ref in rule["backendRefs"])
        if each["kind"] == "RoleBinding":
            references = [*each["subjects"], each["roleRef"]]
            assert all((ref["kind"], ref["name"]) in names for ref in references)
        for pod in pods(each):
            for volume in pod["spec"]["volumes"]:
                claim, config = volume.get("persistentVolumeClaim"), volume.get("configMap")
                assert claim is None or ("PersistentVolumeClaim", claim["claimName"]) in names
                assert config is None or ("ConfigMap", config["name"]) in names
            account = pod["spec"].get("serviceAccountName")
            assert account is None or ("ServiceAccount", account) in names


def container_ports(pod: Manifest) -> list[Manifest]:
    return [port for each in pod["spec"]["containers"] for port in each.get("ports", [])]


def test_the_picker_refers_to_plugins_that_it_lists() -> None:
    """A reference to a plugin that is not listed ends the picker at its start."""
    (config,) = (each for each in everything() if each["kind"] == "ConfigMap")
    picker = yaml.safe_load(config["data"]["picker.yaml"])
    listed = {plugin["type"] for plugin in picker["plugins"]}
    assert {each["pluginRef"] for profile in picker["schedulingProfiles"] for each in profile["plugins"]} <= listed
    metrics = (ROOT / "launch/serve/metrics.py").read_text(encoding="utf-8")
    assert 'f"{VLLM}num_requests_waiting"' in metrics and "kv_cache_usage_perc" in metrics


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with their arguments."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def copied() -> list[tuple[list[str], str]]:
    return [(words[:-1], words[-1]) for name, rest in instructions() if name == "COPY" and (words := rest.split())]


def test_the_image_has_what_its_command_needs(tmp_path: Path) -> None:
    """As far as can be seen without a builder: what is copied starts the app as the manifests do, from its folder."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for sources, target in copied():
        for source in sources:
            assert (ROOT / source).exists() and f"!{source}" in ignored, source
            to = tmp_path / target / (Path(source).name if target.endswith("/") else "")
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, to)
    given = dict(instructions())
    entry = json.loads(given["ENTRYPOINT"])
    assert entry == ["bash", "/opt/lp/torchrun.sh"] and given["WORKDIR"] == "/opt/lp"
    variables = dict(word.split("=", 1) for name, rest in instructions() if name == "ENV" for word in rest.split())
    assert {"LP_SETUP", "PYTHON", "LP_RUN_DIR", "NUMBA_CACHE_DIR"} <= variables.keys()
    env = {"PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin", "HOME": str(tmp_path), "NPROC": "1"}
    env |= {"LP_SETUP": variables["LP_SETUP"], "PYTHON": sys.executable}
    for _, pod in servers():
        args = [*pod["spec"]["containers"][0]["args"], "--cfg", "job"]
        command = [entry[0], str(tmp_path / "torchrun.sh"), *args]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "host: 0.0.0.0" in done.stdout, done.stderr
    assert json.loads(given["CMD"])[0] == "launch.serve"


def test_the_image_is_built_as_docker_reads_it() -> None:
    """What a linter of Dockerfiles finds: an instruction that there is not, commands behind the change of user."""
    names = [name for name, _ in instructions()]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert names[0] == "FROM" and {*names} <= known
    assert all(names.count(once) == 1 for once in ("FROM", "USER", "ENTRYPOINT", "CMD"))
    last_run = max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))
    assert last_run < names.index("USER"), "the user without a name could write nothing"
    for name, rest in instructions():
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))
        if name == "FROM":
            assert re.fullmatch(r"[a-z0-9./-]+:[a-z0-9.-]+", rest) and not rest.endswith(":latest")
        if name == "RUN" and "apt-get install" in rest:
            assert "apt-get update &&" in rest and "-y" in rest and rest.endswith("rm -rf /var/lib/apt/lists/*")
        if name == "ENV":
            assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in rest.split())
    targets = [target for _, target in copied()]
    assert all(target.endswith("/") or target == sources[0] for sources, target in copied()), targets


def test_the_image_installs_what_there_is() -> None:
    """Extras that pyproject.toml has, the pinned versions, and a user that is not root."""
    (run,) = (rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    extras = re.search(r"\.\[([\w,-]+)\]", run)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras and all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))
    assert "-c constraints.txt" in run
    users = [int(rest) for name, rest in instructions() if name == "USER"]
    assert users and all(pod["spec"]["securityContext"]["runAsUser"] == users[-1] > 0 for _, pod in servers())
