"""Images in requests: decodes data URLs, and downloads http and https addresses if the server allows it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from lp.errors import UserError

from ..data.images import MOST_PIXELS, decoded
from .api_errors import SHOWN, ApiError
from .bodies import ImageUrl

if TYPE_CHECKING:
    import httpx  # of the extra
    from PIL.Image import Image

MOST_IMAGES = 16  # of a request
MOST_BYTES = 20 << 20  # of a request's images that are fetched
FETCH_S = 10.0  # for one, redirects included
AT_ONCE = 8  # requests whose images are fetched
MOST_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
SCHEMES = {"http": 80, "https": 443}  # and their ports
# Networks that Python takes for global: those that lead to IPv4 addresses, which are not looked at, and sites' own.
HIDDEN = ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10")
NOT_PUBLIC = [ipaddress.IPv6Network(each) for each in HIDDEN]


def decoded_images(urls: Sequence[str]) -> list[Image]:
    """Decode the images of one request, for the model's processor.

    Args:
        urls: data URLs with base64, as in "data:image/png;base64,...".

    Returns:
        RGB images, in the order of `urls`.

    Raises:
        ValueError: there are more than MOST_IMAGES images; a URL is no such data URL; its content is no image that can
            be decoded (`launch.data.images.decoded`); or all images together have more than MOST_PIXELS pixels.
    """
    if len(urls) > MOST_IMAGES:
        raise UserError(f"the request has {len(urls)} images; it may have {MOST_IMAGES}: send fewer")
    room = MOST_PIXELS
    images = []
    for place, url in enumerate(urls, 1):
        name = f"image {place}"
        images.append(decoded(_data(url, name), name, room))
        room -= images[-1].width * images[-1].height
    return images


def _data(url: str, name: str) -> bytes:
    """The content of a data URL.

    Raises:
        ValueError: it is another URL, or its base64 is none.
    """
    head, comma, content = url.partition(",")
    if not (head.lower().startswith("data:image/") and head.lower().endswith(";base64") and comma):
        raise UserError(f"{name} is {url[:SHOWN]!r}; give a data URL, as in data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"the base64 of {name} is broken ({error}); send it whole") from None


class ImageUrls:
    """Downloads the images that requests name by http and https addresses, if the server allows it.

    It connects only to public addresses, so that clients can't reach the server's own network.

    Args:
        allowed: whether images are downloaded; if not, requests with such addresses are refused. The server's setting
            `allow_image_urls`.
    """

    def __init__(self, allowed: bool = False) -> None:
        self._allowed = allowed
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, images: Sequence[ImageUrl], field: str) -> None:
        """Download a request's images, and replace each http or https address by a data URL with the image's content.

        Args:
            images: all images of the request, changed in place; data URLs stay as they are. All downloads together may
                have MOST_BYTES bytes.
            field: name of the body's field that has the images, such as "messages", for error messages.

        Raises:
            ApiError: status 400: the server downloads no images, or one can't be downloaded.
        """
        named = [(f"image {place}", image) for place, image in enumerate(images[:MOST_IMAGES], 1)]
        named = [(name, image) for name, image in named if image.url[:SHOWN].partition(":")[0].lower() in SCHEMES]
        if not named:
            return
        if not self._allowed:
            name, image = named[0]
            message = f"{name} is {image.url[:SHOWN]!r}, and this server fetches none; send a data URL"
            raise ApiError(400, f"{message}, or start it with allow_image_urls=true", field)
        room = MOST_BYTES
        async with self._turns:
            for name, image in named:
                try:
                    data = await fetched(image.url, name, room)
                except UserError as error:
                    raise ApiError(400, str(error), field) from None
                room -= len(data)
                image.url = f"data:image/any;base64,{base64.b64encode(data).decode()}"


async def fetched(url: str, name: str, room: int = MOST_BYTES) -> bytes:
    """Download the content of a URL, within FETCH_S seconds and over at most MOST_REDIRECTS redirects.

    Args:
        url: an http or https URL.
        name: what errors call the image, such as "image 1".
        room: the most bytes that the content may have.

    Raises:
        ValueError: the host is not at a public address, or does not answer in time; the status is not 200; or the
            content is too large.
    """
    import httpx

    shown = f"{name}, {url[:SHOWN]!r},"
    try:
        async with asyncio.timeout(FETCH_S), httpx.AsyncClient(trust_env=False, timeout=FETCH_S) as client:
            for _ in range(1 + MOST_REDIRECTS):
                status, location, data = await _answer(client, url, room)
                if status == 200:
                    return data
                if status not in REDIRECTS or not location:
                    raise UserError(f"the answer has status {status}")
                url = urljoin(url, location)
            raise UserError(f"there are more than {MOST_REDIRECTS} redirects")
    except TimeoutError:
        reason = f"it took more than {FETCH_S:g} s"
    except (UserError, OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = str(error) or type(error).__name__
    raise UserError(f"{shown} can't be fetched: {reason}; send a data URL")


async def _answer(client: httpx.AsyncClient, url: str, room: int) -> tuple[int, str | None, bytes]:
    """Status, redirect and body of one GET."""
    import httpx

    asked = httpx.URL(url)
    if asked.scheme not in SCHEMES or not asked.host or asked.userinfo:
        raise UserError(f"{url[:SHOWN]!r} is no http or https address without a user's name")
    # To the address that was looked at: a name may lead elsewhere the next time that it is asked for.
    address = await public_address(asked.host, asked.port or SCHEMES[asked.scheme])
    headers = {"Host": asked.netloc.decode(), "User-Agent": "lp", "Accept": "image/*", "Accept-Encoding": "identity"}
    there = asked.copy_with(host=address)
    data = b""
    async with client.stream("GET", there, headers=headers, extensions={"sni_hostname": asked.host}) as response:
        if response.status_code == 200:
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > room:
                    raise UserError(f"it has more than {room} bytes, of {MOST_BYTES} for all images of a request")
        return response.status_code, response.headers.get("location"), data


async def public_address(host: str, port: int) -> str:
    """Resolve a host's name, and refuse it if any of its addresses is not public, as clients must not reach such hosts.

    Args:
        host: name or IP address of the host.
        port: port to connect to.

    Returns:
        One IP address of the host. Connect to this address: the name may resolve to another one the next time.

    Raises:
        ValueError: one of the addresses is this machine's, a private network's, or otherwise not global.
        OSError: the name can't be resolved.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    for address in addresses:
        ip = ipaddress.ip_address(address.partition("%")[0])
        hidden = isinstance(ip, ipaddress.IPv6Address) and any(ip in network for network in NOT_PUBLIC)
        if not ip.is_global or ip.is_multicast or hidden:
            raise UserError(f"{host[:SHOWN]!r} is at {address}, which is no public address")
    return addresses[0]
