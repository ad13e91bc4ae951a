"""Messages between peers that hand each other the files of models."""

from typing import Annotated

import msgspec

from molink.facts.scalars import Count, Text
from molink.wire.messages.base import Message, Payload


class FilesRequest(Message, frozen=True, kw_only=True, tag="files"):
    """Which files make up a model? Answered by :class:`FileList`."""

    ref: Count
    model: Text


class FileEntry(Message, frozen=True, kw_only=True):
    """A file of a model folder: a plain name without separators, and its size in bytes.

    ``digest`` tells copies with the same content from others (a hash of samples of it).
    """

    name: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    size: Count
    digest: Text = ""


class FileList(Message, frozen=True, kw_only=True, tag="file-list"):
    """The files of a model, split over messages; ``more`` says that another follows."""

    ref: Count
    files: tuple[FileEntry, ...]
    more: bool = False


class ReadRequest(Message, frozen=True, kw_only=True, tag="read"):
    """Read ``length`` bytes at ``offset`` of a model's file."""

    ref: Count
    model: Text
    file: Text
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, le=192 * 1024)]


class ReadReply(Message, frozen=True, kw_only=True, tag="data"):
    """Bytes of a file (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload
