"""Images in chats: the tokens of the model's own processor, reused prefixes, and bad ones that disturb nothing."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lp
from tests.launch.serve.test_serve_ranks import ADDRESS
from tests.support.eventually import eventually
from tests.support.forked import Forked
from tests.support.image_folders import END, data_url, image_tokenizer, picture, save_image_model
from tests.support.image_models import IMAGE, generated, image_model
from tests.support.serving import Running, serving
from tests.support.workers import app

for package in ("fastapi", "uvicorn", "prometheus_client", "httpx", "openai", "PIL"):
    pytest.importorskip(package, reason="the extras `serve` and `images` are not installed")
import httpx  # noqa: E402

from launch.data.images import decoded  # noqa: E402
from launch.serve import image_urls  # noqa: E402
from launch.serve.named_keys import NamedKey  # noqa: E402
from launch.serve.spec import SentTensors, TextSpec  # noqa: E402
from launch.serve.unfinished import UnfinishedRequests  # noqa: E402
from launch.text.image_prompts import ImagePrompts  # noqa: E402

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
KEYS = {"ann": NamedKey("ann-key"), "bob": NamedKey("bob-key")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """A server of the tiny LLaVA, in float64, which has named keys."""
    model, tokenizer = lp.load(folder, dtype="float64")
    tokenizer.response_template = {
        "fields": {"tool_calls": {"open_pattern": r"\{\}", "close": "}}", "content": "json"}}
    }
    images = ImagePrompts.of(str(folder), model, tokenizer)
    assert images.processor, images.why_not
    with serving(model, tokenizer, images=images, named_keys=KEYS, api_key="key") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Any:
    return server.openai()


@pytest.fixture
def http_client(server: Running) -> Any:
    """An HTTP client whose answers may be errors."""
    found = server.http()
    found.headers["authorization"] = "Bearer key"
    return found


def user(*parts: str | bytes) -> list[dict[str, Any]]:
    """A message of texts and images, the latter as the content of their files."""
    return [{"role": "user", "content": [part_of(part) for part in parts]}]


def part_of(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part), "detail": "low"}}


def expected(server: Running, folder: Path, messages: list[dict[str, Any]], new: int, seed: int | None = None) -> str:
    """What the decoder gives for what transformers' processor makes of the messages."""
    processor = tf.AutoProcessor.from_pretrained(folder)
    made = processor.apply_chat_template(
        copy.deepcopy(messages),  # transformers 5.17 changes what it is given
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
        return_tensors="pt",
    )
    sampling = None if seed is None else lp.SamplingParams(temperature=0.8, seed=seed)
    made["pixel_values"] = made["pixel_values"].double()
    output = server.decoder.generate(**made, max_new_tokens=new, sampling=sampling, eos_token_id=[END])
    return server.decode(output.tokens)


def error_of(response: Any) -> str:
    """The message of an error, which is a 400."""
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "sampled"])
def test_a_chat_has_the_processors_prompt(
    server: Running, client: Any, folder: Path, asked: dict[str, Any], stream: bool
) -> None:
    """Images were placed, and pixels made, otherwise than transformers does, or got the processor's float32."""
    messages = user("look at ", picture(1), picture(2, 20, 9, "JPEG"), "which is this")
    text = expected(server, folder, messages, 24, asked.get("seed"))
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=24, stream=stream, **asked)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == text
    else:
        assert answer.choices[0].message.content == text
        assert answer.usage.prompt_tokens == len("u:look at which is this;a:") + 2 * 4


@pytest.mark.parametrize("name", ["llava", "gemma3", "idefics3"])
def test_processors_with_pillow_alone(name: str, tmp_path: Path) -> None:
    """Prompt and fields are those of the processor's own apply_chat_template, and tokens those of generate."""
    folder = save_image_model(tmp_path, name)
    model, tokenizer = lp.load(folder, dtype="float64")
    images = ImagePrompts.of(str(folder), model, tokenizer)
    contents = picture(1), picture(2, 20, 14)
    asked = user("see ", contents[0], "and ", contents[1], "now")
    made = images.processor.apply_chat_template(
        asked, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
    ).to(dtype=torch.float64)
    parts = [{"type": "image"} if part["type"] == "image_url" else part for part in asked[0]["content"]]
    found = images.prompt([{"role": "user", "content": parts}], [decoded(data, "it") for data in contents])
    assert found.tokens == made["input_ids"][0].tolist() and found.tokens.count(IMAGE) == 8
    assert all(torch.equal(value, made[field]) for field, value in found.inputs.items())
    tokens = lp.LookaheadDecoder(model).generate(found.tokens, 16, eos_token_id=[], **found.inputs).tokens
    assert tokens == generated(model, made, 16)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format(client: Any, kind: str) -> None:
    """A kind of file that the page promises was refused."""
    data = picture(3, kind=kind)
    answer = client.chat.completions.create(model="demo", messages=user(data, "what"), max_tokens=4, temperature=0)
    assert answer.usage.completion_tokens == 4


def test_forty_requests_at_once(server: Running, client: Any) -> None:
    """A text got another one's image, or other tokens in its company."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

    def ask(index: int) -> str:
        content = ["say ", picture(index % 5), f"item {index}"] if index % 4 else [f"say item {index}"]
        asked: dict[str, Any] = {"messages": user(*content), "max_tokens": 16, "temperature": 0.8, "seed": index}
        asked |= {"response_format": FORM} if index % 5 == 1 else {}
        asked |= {"stop": ["e", "9"]} if index % 7 == 2 else {}
        asked |= {"tools": [TOOL]} if index % 5 == 2 else {}
        if index % 3:
            return str(client.chat.completions.create(model="demo", **asked).choices[0].message)
        chunks = client.chat.completions.create(model="demo", stream=True, **asked)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = [ask(index) for index in range(40)]
    with ThreadPoolExecutor(40) as threads:
        together = [*threads.map(ask, range(40))]
    assert together == alone
    assert len({*alone}) > 30


def test_a_schema_holds_behind_an_image(client: Any) -> None:
    """The form began within the prompt, or was not looked at."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    answer = client.chat.completions.create(
        model="demo", messages=user(picture(1), "a"), max_tokens=40, temperature=0, response_format=FORM, n=2
    )
    assert [choice.message.content[:4] for choice in answer.choices] == ['{"a"'] * 2


def cached(http: Any, messages: list[dict[str, Any]], key: str = "key") -> int:
    """How many tokens of the prompt were cached by an earlier text."""
    asked = {"messages": messages, "max_tokens": 6, "temperature": 0}
    answer = http.post(CHAT, json=asked, headers={"authorization": f"Bearer {key}"}).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_an_image_is_reused_by_its_content(http_client: Any) -> None:
    """A second question about an image computed it again; or one about another image got the first one's."""
    image, other = picture(11), picture(12)
    # With the first image transformers puts hooks on the vision tower, a change of the model that ends all prefixes.
    cached(http_client, user("first ", picture(10)))
    assert cached(http_client, user("see ", image, "one")) == 0
    assert cached(http_client, user("see ", image, "two")) >= len("u:see ") + 4
    assert cached(http_client, user("see ", other, "two")) == 0
    assert cached(http_client, user("see ", image, "one"), "ann-key") == 0, "of another key"
    assert cached(http_client, user("see ", image, "two"), "ann-key") >= len("u:see ") + 4


def test_texts_name_no_image(server: Running, http_client: Any) -> None:
    """`<image>` in a message took the place of an image, so that a client could move or add them."""
    text = "an <image> "
    asked = {"messages": user(text, picture(1), "<end>"), "max_tokens": 8, "temperature": 0}
    usage = http_client.post(CHAT, json=asked).json()["usage"]
    assert usage["prompt_tokens"] == len("u:an <image> <end>;a:") + 4
    images = server.served.images
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>"}]}]
    made = images.prompt(messages, [decoded(picture(1), "it")])
    assert made.tokens.count(IMAGE) == 4 and server.decode(made.tokens) == "u:<image>;a:"


def test_pixels_have_the_models_dtype(server: Running) -> None:
    """A vision tower in bfloat16 was given float32, which not all of them cast."""
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    for dtype in (torch.float64, torch.bfloat16):
        prompts = replace(server.served.images, dtype=dtype)
        assert prompts.prompt(messages, [decoded(picture(1), "it")]).inputs["pixel_values"].dtype == dtype


def test_responses_take_images(server: Running, client: Any, folder: Path) -> None:
    """The newer endpoint refused them, or put them elsewhere than its chat does."""
    text = expected(server, folder, user("see ", picture(4), "now"), 20)
    content = [
        {"type": "input_text", "text": "see "},
        {"type": "input_image", "image_url": data_url(picture(4)), "detail": "auto"},
        {"type": "input_text", "text": "now"},
    ]
    given = [{"role": "user", "content": content}]
    answer = client.responses.create(model="demo", input=given, max_output_tokens=20, temperature=0)
    assert answer.output_text == text


def test_texts_alone_need_no_parts(server: Running, client: Any, folder: Path) -> None:
    """The template prints lists of parts alone: a text as clients send it was lost."""
    alone = server.decoder.generate(server.encode("u:abc;a:"), 12, eos_token_id=[END]).tokens
    for content in ("abc", [{"type": "text", "text": "abc"}]):
        messages = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0)
        assert answer.choices[0].message.content == server.decode(alone)


def with_url(url: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}, {"type": "text", "text": "a"}]}]


def png_of(width: int, height: int) -> bytes:
    """A PNG that says to have this size, whatever it has."""
    data = bytearray(picture(1, 8, 8))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


BROKEN = picture(1, 64, 64)
BAD: list[tuple[list[dict[str, Any]], str]] = [
    (user(BROKEN[: len(BROKEN) // 2], "a"), "image 1 is a broken PNG ("),
    (user(picture(1), b"no image", "a"), "image 2 is no PNG, JPEG, WEBP or GIF that can be read (8 bytes); send it in"),
    (user(picture(1, kind="BMP"), "a"), "image 1 is no PNG, JPEG, WEBP or GIF that can be read"),
    (user(picture(1, kind="TIFF"), "a"), "image 1 is no PNG, JPEG, WEBP or GIF that can be read"),
    (user(b"", "a"), "image 1 is no PNG, JPEG, WEBP or GIF that can be read (0 bytes)"),
    (
        user(png_of(8000, 8000), "a"),
        "image 1 has 8000 x 8000 pixels; the images of a prompt may have 50000000 together:",
    ),
    (user(png_of(20000, 20000), "a"), "image 1 has far more pixels; the images of a prompt may have 50000000"),
    (
        user(png_of(1, 4000), "a"),
        "image 1 is 1 x 4000; its longer side may be 100 times the other: cut it into several",
    ),
    (
        user(picture(1), png_of(8000, 6250), "a"),
        "50000000 together, and those before it leave 49999880: send it smaller",
    ),
    (user(*[picture(1)] * 17, "a"), "the request has 17 images; it may have 16: send fewer"),
    (with_url({"url": "http://127.0.0.1/a.png"}), "image 1 is 'http://127.0.0.1/a.png', and this server fetches none;"),
    (with_url({"url": "HTTPS://example.com/a"}), "or start it with allow_image_urls=true"),
    (with_url({"url": "file:///etc/passwd"}), "image 1 is 'file:///etc/passwd'; give a data URL, as in data:image/png"),
    (with_url({"url": "data:text/html;base64,AAAA"}), "give a data URL, as in data:image/png;base64,..."),
    (with_url({"url": "data:image/png;base64,A*AA"}), "the base64 of image 1 is broken ("),
    (with_url({"url": "data:image/png;base64"}), "give a data URL"),
    (with_url("data:image/png,AAAA"), "give a data URL"),
    (with_url({}), "messages[0].content: image_url has no url; give it one, as in data:image/png"),
    (with_url(None), "a content part of type 'image_url' has no image_url; give it"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "a content part is of type 'input_audio'; give text or"),
    (
        [{**user(picture(1))[0], "role": "system"}],
        "a message of role 'system' has an image; give it in one of role 'user'",
    ),
    (
        [{"role": "user", "content": "a"}, {**user(picture(1))[0], "role": "assistant"}],
        "of role 'assistant' has an image",
    ),
    (user("a" * 600, picture(1)), "tokens, the model's context 512; shorten it"),
]


@pytest.mark.parametrize(("messages", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_image_is_one_error(server: Running, http_client: Any, messages: Any, message: str) -> None:
    """A client's bad image ended its request with a traceback, or was taken for another one."""
    response = http_client.post(CHAT, json={"messages": messages, "max_tokens": 4})
    assert message in error_of(response)
    assert response.json()["error"]["param"] == "messages"


def test_bad_images_disturb_no_other_text(server: Running, client: Any, http_client: Any, folder: Path) -> None:
    """A text that ran meanwhile was ended, or the next one waited for ever."""
    messages = user("see ", picture(21), "all")
    text = expected(server, folder, messages, 64)
    chunks = client.chat.completions.create(model="demo", messages=messages, max_tokens=64, temperature=0, stream=True)
    first = next(chunks)
    for bad, _ in BAD:
        error_of(http_client.post(CHAT, json={"messages": bad}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in [first, *chunks]) == text
    assert http_client.get("/health").status_code == 200


def test_drawn_images(http_client: Any, cases: Any) -> None:
    """Bytes that pillow fails at in a way of its own ended the request with a traceback."""
    statuses = set()
    for seed in cases(30, 400):
        rng = random.Random(seed)
        data = bytearray(picture(seed, kind=rng.choice(["PNG", "JPEG", "WEBP", "GIF"])))
        for _ in range(rng.choice([0, 1, 4])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.choice([len(data), rng.randrange(len(data))])]
        response = http_client.post(CHAT, json={"messages": user(bytes(data), "a"), "max_tokens": 1})
        assert response.status_code in (200, 400), (seed, response.text)
        statuses.add(response.status_code)
    assert statuses == {200, 400}


def test_bad_images_of_responses(http_client: Any) -> None:
    """Errors named a field that the client did not send."""
    image = {"type": "input_image", "image_url": data_url(b"a")}
    for item, message in [
        ({"role": "user", "content": [image]}, "image 1 is no PNG"),
        ({"role": "user", "content": [{**image, "image_url": "https://a.b/c"}]}, "this server fetches none"),
        ({"role": "assistant", "content": [image]}, "an input_image is in another item than a user's message"),
        (
            {"type": "function_call_output", "call_id": "1", "output": [image]},
            "a part is of type 'input_image'; give text here",
        ),
        ({"role": "user", "content": [{"type": "input_image"}]}, "a part of type 'input_image' has no image_url"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "file_id is not supported"),
    ]:
        response = http_client.post(RESPONSES, json={"input": [item]})
        assert message in error_of(response) and response.json()["error"]["param"] == "input"


def test_a_model_of_texts_takes_no_image(demo_server: Running) -> None:
    """The image was left out without a word."""
    response = demo_server.http().post(CHAT, json={"messages": user(picture(1), "a")})
    assert error_of(response) == "this model takes text alone; leave the image out"


class Site(BaseHTTPRequestHandler):
    """Images of a web server, and what makes fetching hard."""

    def do_GET(self) -> None:
        if self.path.startswith("/to"):
            self.send_response(302)
            self.send_header("location", self.path.partition("=")[2])
            self.end_headers()
            return
        slow = self.path == "/slow"
        data = b"a" * 5000 if self.path == "/large" else picture(31)
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        for byte in data if slow else [data]:
            try:
                self.wfile.write(bytes([byte]) if isinstance(byte, int) else byte)
            except OSError:
                return
            if slow:
                threading.Event().wait(0.05)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a web server, whose name is taken for that of a public one."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    honest = image_urls.public_address

    async def looked_up(host: str, port: int) -> str:
        return "127.0.0.1" if host == "site.test" else await honest(host, port)

    monkeypatch.setattr(image_urls, "public_address", looked_up)
    yield f"http://site.test:{made.server_port}"
    made.shutdown()
    made.server_close()


def test_images_are_fetched_where_that_is_allowed(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirects, statuses, sizes and times of a server that anybody can name."""

    def fetched(path: str) -> bytes:
        return asyncio.run(image_urls.fetched(f"{site}{path}", "image 1", 4000))

    assert fetched("/a.png") == picture(31)
    assert fetched(f"/to={site}/a.png") == picture(31) == fetched("/to=/a.png")
    port = site.rpartition(":")[2]
    monkeypatch.setattr(image_urls, "FETCH_S", 1.0)
    for path, message in [
        (f"/to=http://127.0.0.1:{port}/a.png", "'127.0.0.1' is at 127.0.0.1, which is no public address"),
        ("/to=file:///etc/passwd", "'file:///etc/passwd' is no http or https address"),
        ("/to=/to=/to=/to=/a.png", "there are more than 3 redirects"),
        ("/none", "the answer has status 404"),
        ("/large", "it has more than 4000 bytes, of 20971520 for all images"),
        ("/slow", "it took more than 1 s"),
    ]:
        with pytest.raises(ValueError, match="image 1, 'http:") as raised:
            fetched(path)
        assert message in str(raised.value) and str(raised.value).endswith("; send a data URL")


def test_a_server_that_may_fetches(site: str, server: Running, folder: Path) -> None:
    """The setting reaches the endpoint, and what is fetched is the image."""
    model, tokenizer = lp.load(folder, dtype="float64")
    with serving(
        model, tokenizer, images=ImagePrompts.of(str(folder), model, tokenizer), allow_image_urls=True
    ) as running:
        asked = {"messages": with_url({"url": f"{site}/a.png"}), "max_tokens": 12, "temperature": 0}
        answer = running.http().post(CHAT, json=asked).json()
        assert answer["choices"][0]["message"]["content"] == expected(server, folder, user(picture(31), "a"), 12)
        asked["messages"] = with_url({"url": "http://localhost/a.png"})
        assert "which is no public address" in error_of(running.http().post(CHAT, json=asked))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1",
        "::127.0.0.1", "fec0::1",
    ],
)  # fmt: skip
def test_private_addresses_are_refused(host: str) -> None:
    """A client had the server ask what only the server can reach."""
    with pytest.raises(ValueError, match="which is no public address"):
        asyncio.run(image_urls.public_address(host, 80))


def test_one_private_address_of_a_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a public and a private address led to either."""
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: both)
    with pytest.raises(ValueError, match=r"is at 10.0.0.1, which is no public address"):
        asyncio.run(image_urls.public_address("a.test", 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: both[:1])
    assert asyncio.run(image_urls.public_address("a.test", 80)) == "8.8.8.8"


def test_what_ranks_are_sent() -> None:
    """Tensors lost bits."""
    pixels, types = torch.randn(1, 3, 4, 4, dtype=torch.bfloat16), torch.ones(1, 5).long()
    tensors = {"pixel_values": pixels, "mm_token_type_ids": types}
    spec = TextSpec(prompt=[1] * 5, max_new_tokens=9, resumed=[2, 3], images=SentTensors(tensors))
    again = TextSpec.of(json.loads(json.dumps(spec, default=TextSpec.as_data)))
    assert again.images
    for name, tensor in tensors.items():
        assert torch.equal(again.images.tensors[name], tensor)


def test_a_journal_tells_images_apart(tmp_path: Path) -> None:
    """A request with another image went on behind the tokens of the first one."""
    kept = UnfinishedRequests(tmp_path, "model")
    images = [SentTensors({"pixel_values": torch.full((1, 2), value)}) for value in (0.0, 1.0, 0.0)]
    keys = [kept.key([TextSpec(prompt=[1], max_new_tokens=2, images=image)]) for image in [*images, None]]
    assert keys[0] == keys[2] and len({*keys}) == 3


def test_a_checkpoint_without_a_processor(tmp_path: Path) -> None:
    """The server did not start, or said nothing of what is missing."""
    image_model("llava", dtype=torch.float32).save_pretrained(tmp_path)
    image_tokenizer().save_pretrained(tmp_path)
    made = ImagePrompts.of(str(tmp_path), *lp.load(tmp_path))
    with pytest.raises(ValueError, match=r"can't be read: .*; put its processor \(preprocessor_config.json\) beside"):
        made.check()


def test_packages_that_are_missing(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What to install was a page of transformers' hints, or ended the server at its start."""
    model, tokenizer = lp.load(folder)

    def missing(*args: Any, **options: Any) -> None:
        raise ImportError("\nPixtralProcessor requires the Torchvision library but it was not found. Check out\nmore\n")

    monkeypatch.setattr(tf.AutoProcessor, "from_pretrained", missing)
    with pytest.raises(ValueError) as raised:
        ImagePrompts.of(str(folder), model, tokenizer).check()
    message = str(raised.value)
    assert "PixtralProcessor requires the Torchvision library" in message and "[images]" in message
    assert "\n" not in message and "Check out" not in message


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks(forked: Forked, folder: Path, server: Running, tmp_path: Path, tp: int) -> None:
    """A rank without the image computed other nodes than the others, or waited for ever."""
    settings = ["model=hf", f"model.name={folder}", "model.dtype=float64", "port=0", "cache_tokens=8192"]
    settings += ["decoder=lookahead", "W=5", "N=3", "G=4", f"parallel.tp={tp}"]
    launch = forked.start(2, app.main, tmp_path, "serve", *settings, env={"LP_RUN_DIR": str(tmp_path)})
    eventually(lambda: ADDRESS.search(launch.output()) or not launch.goes_on(), 120)
    found = ADDRESS.search(launch.output())
    assert found, launch.output()
    with httpx.Client(base_url=found[1], timeout=60) as client:

        def ask(index: int) -> Any:
            messages = user("see ", picture(index), "all") if index % 3 else user("text alone")
            asked = {"messages": messages, "max_tokens": 20, "temperature": 0.8, "seed": index}
            return client.post(CHAT, json=asked).json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(6) as threads:
            texts = [*threads.map(ask, range(6))]
        for index, text in enumerate(texts):
            if index % 3:
                assert text == expected(server, folder, user("see ", picture(index), "all"), 20, index)
        bad = client.post(CHAT, json={"messages": user(b"no image", "a")})
        assert "image 1 is no PNG" in error_of(bad)
        for process in launch.processes:
            process.terminate()
    launch.check(30)
