"""Decode images from files and requests, which may be hostile: only known formats, and a bounded number of pixels."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from lp.commands import install_command
from lp.errors import UserError
from lp.optional import is_installed

if TYPE_CHECKING:
    from PIL.Image import Image  # which is optional

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # those that browsers and clients send; of several frames the first one
MOST_PIXELS = 50_000_000  # of all images of a prompt: 150 MB as bytes
MOST_RATIO = 100  # of an image's sides: processors as LLaVA's first enlarge the shorter one to some 336 pixels


def decoded(data: bytes, name: str, room: int = MOST_PIXELS) -> Image:
    """Decode an image file into an RGB image, turned upright as its EXIF orientation says.

    Args:
        data: content of the image file; it may be anything.
        name: the image's name in error messages, as in "photo.jpg".
        room: most pixels that the image may have: MOST_PIXELS, minus the pixels of the images before it in the prompt.

    Raises:
        ValueError: not an image in one of FORMATS, broken, too many pixels, one side more than MOST_RATIO times the
            other; or pillow is not installed.
    """
    if not is_installed("PIL"):
        raise UserError(f"images need pillow; install the extra: {install_command('images')}")
    from PIL import Image, ImageOps

    known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:  # some 180 million pixels
        raise _too_large(name, "far more", room) from None
    except Exception as error:  # nothing of ours runs in there
        message = f"{name} is no {known} that can be read ({len(data)} bytes); send it in one of these"
        raise UserError(message) from error
    width, height = image.size
    if width * height > room:
        raise _too_large(name, f"{width} x {height}", room)
    if max(width, height) > MOST_RATIO * min(width, height):
        raise UserError(
            f"{name} is {width} x {height}; its longer side may be {MOST_RATIO} times the other: cut it into several"
        )
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{name} is a broken {image.format} ({reason}); send it whole") from error


def _too_large(name: str, size: str, room: int) -> UserError:
    left = "" if room == MOST_PIXELS else f", and those before it leave {room}"
    return UserError(
        f"{name} has {size} pixels; the images of a prompt may have {MOST_PIXELS} together{left}: send it smaller"
    )
