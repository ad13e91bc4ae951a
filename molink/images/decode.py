"""Decodes clients' images, which are untrusted."""

import base64
import binascii
import io
import warnings

from PIL import Image, ImageOps

from molink.errors import RequestError

#: Pillow's names of the accepted formats.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
#: Maximum pixels of an image; a decoded pixel takes a few bytes.
MAX_PIXELS = 64_000_000
_FORMAT_NAMES = "PNG, JPEG, WebP or GIF"
#: Characters of a URL that an error quotes.
_SHOWN = 32


def decode_data_url(url: str, field: str) -> Image.Image:
    """Decode an image from a ``data:`` URL in base64; its media type is ignored.

    Raises:
        RequestError: it is another kind of URL, or not an accepted image.
    """
    scheme, comma, data = url.partition(",")
    if not scheme.startswith("data:"):
        raise RequestError(
            f"`{field}`: molink fetches nothing, so {scheme[:_SHOWN]!r} is not supported: send the "
            "image as a data: URL",
            field,
        )
    if not comma or not scheme.endswith(";base64"):
        raise RequestError(f"`{field}`: expected data:image/…;base64,…", field)
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"`{field}`: not valid base64: {error}", field) from None
    return decode_image(decoded, field)


def decode_image(data: bytes, field: str) -> Image.Image:
    """Decode an image to RGB, rotated by its EXIF orientation, with as few copies as possible.

    Raises:
        RequestError: it is of another format, animated, too large or damaged.
    """
    Image.MAX_IMAGE_PIXELS = None  # checked below, with molink's own message
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_image(image, field)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == "RGB" else image.convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # a decoder may raise anything
        reason = "" if "cannot identify" in str(error) else f" ({error})"
        raise RequestError(
            f"`{field}`: not a readable image, which may be {_FORMAT_NAMES}{reason}", field
        ) from None


def _check_image(image: Image.Image, field: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"`{field}`: the image has {width}x{height} pixels; at most "
            f"{MAX_PIXELS // 1_000_000} million",
            field,
        )
    if getattr(image, "is_animated", False):
        raise RequestError(f"`{field}`: animated images are not supported", field)
