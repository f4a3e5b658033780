"""Adapters of a server: clients choose one as the model, in requests that share steps, beside images and texts."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import lp
from tests.support.adapted import NAMES, linear_layers
from tests.support.image_folders import data_url, picture, save_image_model
from tests.support.peft_releases import skip_without_peft
from tests.support.serving import Running, serving
from tests.support.tiny_models import tiny_model

for package in ("fastapi", "uvicorn", "prometheus_client", "httpx", "openai", "PIL", "peft"):
    pytest.importorskip(package, reason="the extras `serve`, `images` and `adapters` are not installed")
import openai  # noqa: E402
import peft  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402

from launch.config.schema import register, settings  # noqa: E402
from launch.running.hydra_app import CONF  # noqa: E402
from launch.serve.adapters import check_adapters, load_adapters  # noqa: E402
from launch.serve.start_up import check_answering  # noqa: E402
from launch.text.image_prompts import ImagePrompts  # noqa: E402

NEW = 24


def save_adapter(model: Any, folder: Path, seed: int) -> str:
    """Save a random adapter of a model as PEFT does."""
    import torch

    torch.manual_seed(seed)
    targets = [name for name in linear_layers(model) if "language_model" in name or "vision" not in name]
    targets = [name for name in targets if "projector" not in name]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2 + seed, lora_alpha=16, init_lora_weights=False, target_modules=targets
    )
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tiny LLaVA, under "", and adapters of it."""
    skip_without_peft()
    root = tmp_path_factory.mktemp("adapters")
    save_image_model(root / "model")
    model = lp.load(root / "model", dtype="float64").model
    return {"": str(root / "model")} | {name: save_adapter(model, root / name, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[Running]:
    """A server of it with its adapters, in float64."""
    model, tokenizer = lp.load(folders[""], dtype="float64")
    load_adapters(model, {name: folders[name] for name in NAMES})
    images = ImagePrompts.of(folders[""], model, tokenizer)
    with serving(model, tokenizer, images=images, adapters=NAMES) as running:
        yield running


def completion(client: Any, model: str, prompt: str, **options: Any) -> Any:
    return client.completions.create(model=model, prompt=prompt, max_tokens=NEW, **{"temperature": 0} | options)


def test_a_client_chooses_an_adapter_as_the_model(server: Running) -> None:
    """Under its name, in answers and in the list, and the text is the decoder's with that adapter."""
    client = server.openai()
    listed = client.models.list().data
    assert [each.id for each in listed] == ["demo", *NAMES]
    assert [each.model_extra.get("parent") for each in listed] == [None, *["demo"] * 3]
    assert client.models.retrieve("green").id == "green"
    texts = {}
    for name in ("demo", *NAMES):
        answer = completion(client, name, "a quick brown fox")
        adapter = name if name in NAMES else None
        ids = server.encode("a quick brown fox")
        assert answer.model == name
        assert answer.choices[0].text == server.decode(server.decoder.generate(ids, NEW, adapter=adapter).tokens)
        texts[name] = answer.choices[0].text
    assert len(set(texts.values())) == 4, "adapters that change nothing test nothing"


def test_llama_cpps_endpoint_takes_an_adapters_name(server: Running) -> None:
    """It would answer with the model's own text; any other name is the model, as a server of llama.cpp has one."""
    client = server.http()

    def text(**fields: Any) -> str:
        body = {"prompt": "a quick brown fox", "n_predict": NEW, "temperature": 0, **fields}
        return str(client.post("/completion", json=body).json()["content"])

    own = completion(server.openai(), "demo", "a quick brown fox").choices[0].text
    green = completion(server.openai(), "green", "a quick brown fox").choices[0].text
    assert (text(), text(model="any"), text(model="green")) == (own, own, green)


def test_requests_of_all_kinds_at_once(server: Running) -> None:
    """Images, texts, streams and three adapters, sampled and not: each as it is alone."""
    rng = random.Random(3)
    client = server.openai()
    requests: list[tuple[str, dict[str, Any]]] = []
    for number in range(40):
        model = rng.choice(["demo", *NAMES])
        content: Any = "".join(rng.choices("abc def", k=rng.randint(3, 20)))
        if model == "demo" and rng.random() < 0.6:
            url = {"url": data_url(picture(number % 5))}
            content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": content}]
        options = {"temperature": rng.choice([0, 0.8]), "seed": number, "max_tokens": rng.randint(4, NEW)}
        requests.append((model, {"messages": [{"role": "user", "content": content}], **options}))
    assert sum(isinstance(body["messages"][0]["content"], list) for _, body in requests) >= 4

    def answer(request: tuple[str, dict[str, Any]], stream: bool) -> str:
        model, body = request
        if not stream:
            return str(client.chat.completions.create(model=model, **body).choices[0].message.content or "")
        chunks = client.chat.completions.create(model=model, stream=True, **body)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    alone = [answer(request, stream=False) for request in requests]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(lambda pair: answer(pair[1], stream=bool(pair[0] % 2)), enumerate(requests)))
    assert together == alone


def test_what_is_refused(server: Running) -> None:
    """One clear error each, and the server goes on."""
    client = server.openai()
    with pytest.raises(openai.NotFoundError, match="there is no model 'grey'; this server has 'demo' or 'red'"):
        completion(client, "grey", "a")
    with pytest.raises(openai.BadRequestError, match="model 'red' is an adapter, which takes text alone"):
        content = [{"type": "image_url", "image_url": {"url": data_url(picture(1))}}, {"type": "text", "text": "a"}]
        client.chat.completions.create(model="red", messages=[{"role": "user", "content": content}])
    with pytest.raises(openai.BadRequestError, match="logprobs of an echoed prompt are the model's own alone"):
        completion(client, "red", "a b", echo=True, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="start the server with adapters"):
        completion(client, "demo", "a", extra_body={"lora": "red"})
    assert completion(client, "red", "a").model == "red"


def test_prefixes_are_an_adapters_own(server: Running) -> None:
    """A prompt that comes again begins behind its own cache, and under another adapter it does not."""
    client = server.openai()
    prompt = "one two one two one two three"

    def cached(model: str) -> int:
        usage = completion(client, model, prompt).usage
        return usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0

    assert [cached("red"), cached("blue")] == [0, 0]
    assert cached("red") > 0


def test_folders_are_looked_at_before_the_model_is_loaded(folders: dict[str, str], tmp_path: Path) -> None:
    """Each by its key."""
    own = frozenset({"demo"})
    check_adapters({"red": folders["red"]}, own)
    with pytest.raises(ValueError, match=r"adapters has 'demo', which is the model's own name"):
        check_adapters({"demo": folders["red"]}, own)
    with pytest.raises(ValueError, match=r"adapters has 'a/b', which is no name"):
        check_adapters({"a/b": folders["red"]}, own)
    with pytest.raises(ValueError, match=r"adapters.red is '.*', which has no adapter_config.json"):
        check_adapters({"red": str(tmp_path)}, own)
    shutil.copy(Path(folders["red"], "adapter_config.json"), tmp_path)
    with pytest.raises(ValueError, match=r"which has no adapter_model.safetensors"):  # a pickle is not read
        check_adapters({"red": str(tmp_path)}, own)


def test_an_adapter_of_another_model_is_refused(folders: dict[str, str]) -> None:
    """By its name, where layers are others and where they have other sizes."""
    with pytest.raises(ValueError, match=r"adapters.red .* can't be loaded into this model"):
        load_adapters(tiny_model("llama"), {"red": folders["red"]})
    larger = tiny_model("llama", hidden_size=64)
    smaller = tiny_model("llama")
    target = Path(folders["red"]).parent / "smaller"
    save_adapter(smaller, target, 1)
    with pytest.raises(ValueError, match=r"adapters.red"):
        load_adapters(larger, {"red": str(target)})


def test_what_would_change_the_models_own_texts_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    """PiSSA took its part out of the model's weights; a model that is an adapter's folder lost its adapter."""
    shutil.copytree(folders["red"], tmp_path / "red")
    config = tmp_path / "red" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"init_lora_weights": "pissa_niter_4"}))
    with pytest.raises(ValueError, match="init_lora_weights='pissa_niter_4', which changes the model's own weights"):
        check_adapters({"red": str(tmp_path / "red")}, frozenset())
    model = tiny_model("llama")
    model.add_adapter(peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="the model is an adapter's folder itself"):
        load_adapters(model, {"red": folders["red"]})


def test_ranks_that_divide_a_model_have_none(folders: dict[str, str]) -> None:
    """Each holds a part of a layer, and an adapter's file the whole of it."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = settings(compose("serve", [f"adapters={{red: {folders['red']}}}", "parallel.tp=2"]))
    with pytest.raises(ValueError, match=r"adapters is given with parallel\.tp=2"):
        check_answering(config)


def test_an_adapter_that_lacks_weights_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    """They would stay as they were drawn: transformers only warns, and names other adapters' weights, too."""
    shutil.copytree(folders["red"], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(file)
    lacking = sorted(weights)[0]
    safetensors.torch.save_file({name: values for name, values in weights.items() if name != lacking}, file)
    model = lp.load(folders[""], dtype="float64").model
    with pytest.raises(
        ValueError, match=r"adapters\.green .* is of another model: .* \(of 1\) does not belong together"
    ):
        load_adapters(model, {"red": folders["red"], "green": str(tmp_path)})
