"""Drawn requests with images and adapters: broken, huge and foreign ones get an error of their own, never a 500."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="the extra `dev` is not installed")

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lp
from tests.conftest import LONG
from tests.support.adapted import NAMES
from tests.support.image_folders import data_url, picture
from tests.support.requests_of import ANYTHING
from tests.support.serving import Running, serving

for package in ("fastapi", "uvicorn", "prometheus_client", "PIL", "peft"):
    pytest.importorskip(package, reason="the extras `serve`, `images` and `adapters` are not installed")

from launch.serve.adapters import load_adapters  # noqa: E402
from launch.text.image_prompts import ImagePrompts  # noqa: E402
from tests.launch.serve.test_adapters import folders  # noqa: E402, F401  (a fixture)

EXAMPLES = 1000 if LONG else 200
GOOD = data_url(picture(1))
WHOLE = picture(1)
KINDS = ["png", "jpeg", "webp", "gif", "svg+xml", "tiff", "x-icon"]
SCHEMES = [
    "http://127.0.0.1:1/a.png",
    "https://localhost/a",
    "file:///etc/passwd",
    "ftp://a/b",
    "data:",
    "data:,a",
    "",
    "\0",
]


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header has another size than its content, and the checksum of that header."""
    header = b"IHDR" + struct.pack(">II", width, height) + WHOLE[24:29]
    return WHOLE[:12] + header + struct.pack(">I", zlib.crc32(header)) + WHOLE[33:]


def _with_byte(at: int, value: int) -> bytes:
    """The image with one byte changed."""
    return WHOLE[: at % len(WHOLE)] + bytes([value]) + WHOLE[at % len(WHOLE) + 1 :]


CONTENTS = st.one_of(
    st.just(WHOLE),
    st.sampled_from([0, 8, 33, 40, len(WHOLE) // 2, len(WHOLE) - 13]).map(lambda end: WHOLE[:end]),
    st.builds(_with_byte, st.integers(0, len(WHOLE)), st.integers(0, 255)),
    st.builds(claiming, *[st.sampled_from([0, 7, 2**13, 2**16, 2**32 - 1])] * 2),
    st.binary(max_size=60),
)


def mostly(sound: st.SearchStrategy[Any], junk: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draws of the first, but for one in eight: were there more of the second, few bodies would come far."""
    return st.sampled_from([sound] * 7 + [junk]).flatmap(lambda chosen: chosen)


URLS = mostly(
    st.builds(data_url, CONTENTS, st.sampled_from(KINDS)),
    st.sampled_from(SCHEMES)
    | st.builds(lambda content: "data:image/png;base64," + base64.b85encode(content).decode(), CONTENTS)
    | ANYTHING,
)
PARTS = mostly(
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, URLS)
    | st.builds(lambda text: {"type": "text", "text": text}, st.sampled_from(["abc", "<image>", "a <image> b"])),
    st.builds(lambda url, detail: {"type": "image_url", "image_url": {"url": url, "detail": detail}}, URLS, ANYTHING)
    | st.builds(lambda url: {"type": "input_image", "image_url": url}, URLS)
    | ANYTHING,
)
MODELS = mostly(st.sampled_from(["demo"] * 6 + [*NAMES]), st.sampled_from(["", "grey", "../red"]) | ANYTHING)
BODIES = st.builds(
    lambda parts, model, seed, behind: {
        "model": model,
        "messages": [
            {"role": "user", "content": [*parts, *([{"type": "text", "text": "what is it"}] if behind else [])]}
        ],
        "max_tokens": 3,
        "seed": seed,
    },
    st.lists(PARTS, min_size=1, max_size=3),
    MODELS,
    st.integers(0, 9),
    st.booleans(),
)


@pytest.fixture(scope="module")
def server(folders: dict[str, str]) -> Iterator[Running]:  # noqa: F811
    """The tiny LLaVA and its adapters."""
    model, tokenizer = lp.load(folders[""], dtype="float32")
    load_adapters(model, {name: folders[name] for name in NAMES})
    images = ImagePrompts.of(folders[""], model, tokenizer)
    with serving(model, tokenizer, images=images, adapters=NAMES) as running:
        yield running


def test_drawn_images_and_adapters(server: Running) -> None:
    """What a sound request gets is the same behind all of them."""
    content = [{"type": "image_url", "image_url": {"url": GOOD}}, {"type": "text", "text": "what is it"}]
    sound = {"messages": [{"role": "user", "content": content}], "max_tokens": 9, "temperature": 0}
    statuses: list[int] = []
    errors: list[str] = []
    with httpx.Client(base_url=server.url, timeout=120, headers={"content-type": "application/json"}) as client:

        def answer(body: Any) -> httpx.Response:
            return client.post("/v1/chat/completions", content=json.dumps(body))

        before = answer(sound).json()["choices"]

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=not LONG,
            suppress_health_check=[*HealthCheck],
        )
        @given(BODIES)
        def each(body: dict[str, Any]) -> None:
            got = answer(body)
            assert got.status_code in {200, 400, 404, 413, 422}, (got.status_code, got.text)
            assert got.status_code == 200 or got.json()["error"]["message"], got.text
            assert "root:" not in got.text
            statuses.append(got.status_code)
            errors.append(got.text if got.status_code != 200 else "")

        each()
        assert {200, 400, 404} <= {*statuses} and statuses.count(200) > EXAMPLES / 10
        for met in ("that can be read", "is a broken PNG", "has far more pixels"):
            assert any(met in error for error in errors), f"no image was refused with: {met}"
        assert answer(sound).json()["choices"] == before
