"""Transfer of model files between peers."""

from molink.facts.model import Root
from molink.facts.scalars import Count, Index, Text
from molink.wire.messages.base import Message, Payload


class ManifestRequest(Message, frozen=True, kw_only=True, tag="manifest-request"):
    """Read the manifest (:mod:`molink.checkpoint.manifest`) of a model from byte ``offset`` on.

    Answered by :class:`ManifestChunk`.
    """

    ref: Count
    root: Root
    offset: Index


class ManifestChunk(Message, frozen=True, kw_only=True, tag="manifest-chunk"):
    """Bytes of a manifest (payload ``u8 [n]``) of ``size`` bytes in all."""

    ref: Count
    size: Count
    payload: Payload


class PartsRequest(Message, frozen=True, kw_only=True, tag="parts-request"):
    """Ask which parts of a model the receiver has.

    Answered by :class:`PartsReply`. Only for peers that report partial models
    (``PeerReport.partial_models``).
    """

    ref: Count
    root: Root


class PartsReply(Message, frozen=True, kw_only=True, tag="parts-reply"):
    """One bit per part of the model in manifest order (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload


class ReadRequest(Message, frozen=True, kw_only=True, tag="read-request"):
    """Read chunk ``index`` of a file or tensor of a model.

    With a ``length``, read only that many bytes from ``offset`` on.
    """

    ref: Count
    root: Root
    part: Text
    index: Index
    offset: Index = 0
    length: Index = 0


class ReadReply(Message, frozen=True, kw_only=True, tag="read-reply"):
    """A chunk (payload ``u8 [n]``)."""

    ref: Count
    payload: Payload
