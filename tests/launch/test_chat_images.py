"""launch.chat with images: what /image gives to the next message, what it refuses, and several ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

pytest.importorskip("PIL", reason="the package pillow is not installed")

import lp
from launch.chat.conversation import Chat
from launch.chat.history import History
from launch.chat.settings import Settings
from launch.config.schema import AutoregressiveSchema, ChatConfig, GreedySchema
from launch.text.image_prompts import ImagePrompts
from launch.text.stream import Pen
from lp.parallel.context import ParallelContext
from lp.parallel.thread_ranks import run_lockstep
from tests.support.apps import Ran
from tests.support.image_folders import END, picture, save_image_model

NEW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def talk(launch_chat: Callable[..., Ran], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts launch.chat with these lines, in a folder with two images."""
    monkeypatch.chdir(tmp_path)
    for name, seed in {"a.png": 1, "b c.png": 2}.items():
        Path(name).write_bytes(picture(seed, 20, 10))
    small = ("model=hf", f"model.name={folder}", "model.dtype=float64", "W=4", "N=3", "G=4", f"max_new_tokens={NEW}")
    return lambda lines, *overrides: launch_chat(lines, *small, *overrides)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the decoder was asked, and what it gave."""
    calls: list[dict[str, Any]] = []
    honest = lp.LookaheadDecoder.generate

    def noted(self: lp.LookaheadDecoder, ids: list[int], *args: Any, **options: Any) -> lp.GenerationOutput:
        output = honest(self, ids, *args, **options)
        text = options["tokenizer"].decode(output.tokens, skip_special_tokens=True)
        calls.append({"ids": ids, "pixels": options.get("pixel_values"), "tokens": output.tokens, "text": text})
        return output

    monkeypatch.setattr(lp.LookaheadDecoder, "generate", noted)
    return calls


def test_an_image_of_the_next_message(talk: Any, asked: list[dict[str, Any]], folder: Path) -> None:
    """It went to another message, or was gone in the turn behind it; names of files may have spaces."""
    ran = talk("/image a.png\n/image b c.png\nwhich\nand now\n/image a.png\n/reset\nalone\n")
    assert ran.code == 0 and ran.err == ""
    assert "a.png (20 x 10) goes with your next message\nb c.png (20 x 10) goes with" in ran.out
    processor = tf.AutoProcessor.from_pretrained(folder)
    images = [{"type": "image", "url": name} for name in ("a.png", "b c.png")]
    messages = [{"role": "user", "content": [*images, {"type": "text", "text": "which"}]}]
    for call in asked[:2]:
        made = processor.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
        assert call["ids"] == made["input_ids"][0] and len(call["pixels"]) == 2
        answer = {"role": "assistant", "content": [{"type": "text", "text": call["text"]}]}
        messages += [answer, {"role": "user", "content": [{"type": "text", "text": "and now"}]}]
    model, _ = lp.load(folder, dtype="float64")
    first = asked[0]
    alone = lp.PlainDecoder(model).generate(first["ids"], NEW, eos_token_id=[END], pixel_values=first["pixels"])
    assert first["tokens"] == alone.tokens
    assert asked[2]["pixels"] is None and processor.tokenizer.decode(asked[2]["ids"]) == "u:alone;a:"


def test_a_bad_image_is_one_line(talk: Any, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    """The chat ended with a traceback, or the bad image went along."""
    Path("notes.txt").write_text("no image")
    Path("half.png").write_bytes(picture(1, 64, 64)[:500])
    ran = talk("/image\n/image none.png\n/image notes.txt\n/image half.png\n/image .\nhello\n/help\n")
    errors = ran.err.splitlines()
    assert ran.code == 0 and len(errors) == 5 and all(line.startswith("error: ") for line in errors)
    assert "/image has no file; write /image FILE" in errors[0]
    assert "none.png can't be read (No such file or directory); give /image a file with an image" in errors[1]
    assert "notes.txt is no PNG, JPEG, WEBP or GIF that can be read (8 bytes)" in errors[2]
    assert "half.png is a broken PNG" in errors[3] and "can't be read (Is a directory)" in errors[4]
    assert len(asked) == 1 and asked[0]["pixels"] is None
    assert "/image FILE " in ran.out


def test_a_model_of_texts(launch_chat: Callable[..., Ran], tiny_folder: Path, tmp_path: Path) -> None:
    """The image was read, and left out without a word."""
    (tmp_path / "a.png").write_bytes(picture(1))
    ran = launch_chat(f"/image {tmp_path / 'a.png'}\n", "model=hf", f"model.name={tiny_folder}")
    assert ran.err == "error: this model takes text alone; leave the image out\n"


def test_ranks_have_the_image_of_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each rank read a file of its own, which another machine has not, and a missing one parted them."""
    monkeypatch.chdir(tmp_path)
    loaded = lp.load(folder, dtype="float64")
    images = ImagePrompts.of(str(folder), *loaded)
    config = ChatConfig(decoder=AutoregressiveSchema(), sampling=GreedySchema(), max_new_tokens=4)
    content = picture(1)
    reads: list[str] = []

    def read(path: str) -> bytes:
        reads.append(path)
        if path == "none.png":
            raise lp.UserError("there is none")
        return content

    monkeypatch.setattr("launch.chat.conversation.read_image", read)

    def body(context: ParallelContext) -> list[Any]:
        lines = iter(["/image none.png", "/image a.png", "one", None])

        class Typed:
            def read(self) -> str | None:
                return next(lines)

        history = History(loaded.tokenizer, 512, images=images)
        said: dict[str, Any] = {"keyboard": Typed() if context.is_main else None, "pen": Pen(io.StringIO(), False)}
        decoder = lp.PlainDecoder(loaded.model, context)
        said |= {"config": config, "context": context, "loaded": loaded, "history": history, "decoder": decoder}
        chat = Chat(settings=Settings.of(config), **said)
        chat.run()
        return [(turn.line, turn.answer, len(turn.images)) for turn in chat.history.turns]

    turns = run_lockstep(2, body)
    assert turns[0] == turns[1] and turns[0][0][0] == "one" and turns[0][0][2] == 1
    assert reads == ["none.png", "a.png"]
