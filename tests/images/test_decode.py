"""Clients' images are decoded within bounds, or refused with one line."""

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from molink.errors import RequestError
from molink.images.decode import FORMATS, decode_data_url
from tests.support.sight import encode_picture, make_picture


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header states this size, with the pixels of at most one line."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(8))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


def save(frames: list[Image.Image], kind: str, **options: Any) -> str:
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=len(frames) > 1, append_images=frames[1:], **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str) -> None:
    picture = make_picture(20, 30)
    shown = picture.convert("P") if kind == "GIF" else picture
    decoded = decode_data_url(f"data:image/x;base64,{encode_picture(shown, kind)}", "x")
    assert (decoded.size, decoded.mode) == ((20, 30), "RGB")


def test_a_picture_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = save([make_picture(20, 30)], "JPEG", exif=exif)
    assert decode_data_url(f"data:;base64,{data}", "x").size == (30, 20)


FRAMES = [make_picture(8, 8, seed) for seed in (1, 2)]
BAD = {
    "too large": (base64.b64encode(png_of_size(60_000, 60_000)).decode(), "60000x60000 pixels"),
    "no pixels": (base64.b64encode(png_of_size(10, 10)).decode(), "not a readable image"),
    "truncated": (encode_picture(make_picture(90, 90), "JPEG")[:400], "not a readable image"),
    "other format": (save([make_picture(8, 8)], "BMP"), "PNG, JPEG, WebP or GIF"),
    "text": (base64.b64encode(b"GIF89a, said the fox").decode(), "not a readable image"),
    "animated GIF": (save(FRAMES, "GIF"), "animated"),
    "animated WebP": (save(FRAMES, "WEBP"), "animated"),
    "animated PNG": (save(FRAMES, "PNG"), "animated"),
    "not base64": ("ä" * 10, "not valid base64"),
    "empty": ("", "not a readable image"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(RequestError, match=message) as caught:
        decode_data_url(f"data:image/png;base64,{data}", "images[0]")
    text = str(caught.value)
    assert text.startswith("`images[0]`: ")
    assert "\n" not in text


@pytest.mark.parametrize(
    "url", ["https://example.org/a.png", "file:///etc/passwd", "", "data:image/png,abc", "x" * 9999]
)
def test_nothing_is_fetched(url: str) -> None:
    with pytest.raises(RequestError, match="data:") as caught:
        decode_data_url(url, "images[0]")
    assert len(str(caught.value)) < 200
