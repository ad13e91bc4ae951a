"""Messages between peers that hand each other the files of models."""

from molink.facts.model import Root
from molink.facts.scalars import Count, Index, Text
from molink.wire.messages.base import Message, Payload


class ManifestRequest(Message, frozen=True, kw_only=True, tag="manifest"):
    """Read from byte ``offset`` the manifest of the model with that root.

    What it is: :mod:`molink.checkpoint.manifest`. Answered by :class:`ManifestChunk`.
    """

    ref: Count
    root: Root
    offset: Index


class ManifestChunk(Message, frozen=True, kw_only=True, tag="manifest-part"):
    """Bytes of a manifest (payload ``u8 [n]``) that has ``size`` of them in all."""

    ref: Count
    size: Count
    payload: Payload


class PartsRequest(Message, frozen=True, kw_only=True, tag="parts"):
    """Which parts of the model with that root the receiver has. Answered by :class:`PartsReply`.

    Only for who says that it has some (``PeerReport.parts``): an older molink doesn't know it.
    """

    ref: Count
    root: Root


class PartsReply(Message, frozen=True, kw_only=True, tag="parts-held"):
    """A bit for each part of the model, in its manifest's order (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class ReadRequest(Message, frozen=True, kw_only=True, tag="read"):
    """Read chunk ``index`` of a file or tensor of the model with that root.

    With a ``length``, so many bytes of it from ``offset`` on.
    """

    ref: Count
    root: Root
    part: Text
    index: Index
    offset: Index = 0
    length: Index = 0


class ReadReply(Message, frozen=True, kw_only=True, tag="data"):
    """A chunk (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload
