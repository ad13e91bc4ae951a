"""Messages between endpoints and schedulers: requests, their tokens, their end."""

from hashlib import blake2b
from typing import Annotated, Literal

import msgspec

from molink.facts.images import MAX_TILES, ImageInput, ImageSpan
from molink.facts.model import AdapterName
from molink.facts.ring_times import RequestCosts
from molink.facts.scalars import Count, Index, Sentence, Text
from molink.wire.messages.base import LeanMessage, Payload
from molink.wire.messages.data_plane import (
    MAX_GRAMMAR_BYTES,
    MAX_SLICES,
    MAX_TOP_LOGPROBS,
    Epoch,
    SamplingParams,
)

#: Maximum number of token ids that end an answer; models have a few.
MAX_STOP_IDS = 64
#: Maximum characters of a client's name.
MAX_CLIENT = 32
#: Maximum bytes of a cache salt.
MAX_CACHE_SALT = 16
#: Bytes of the cache scope of requests with an adapter; longer than any salt.
_ADAPTER_SCOPE_BYTES = 32

#: Maximum bytes of pixels in flight, and in a message.
PIXEL_WINDOW, PIXEL_FRAGMENT = 256 << 10, 64 << 10

#: As in vLLM's API: lower is served first.
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
#: Seconds; 0 if unspecified.
QueueSeconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Request(LeanMessage, frozen=True, tag=False):
    """A client's request: token ids in, token ids out.

    The client's endpoint creates it once, and it reaches the scheduler unchanged, even if pipelines
    end meanwhile.
    """

    model: Text
    prompt_token_ids: tuple[Index, ...]
    #: Tokens to generate, in all epochs together.
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    sampling_params: SamplingParams
    stop_token_ids: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_STOP_IDS)] = ()
    #: Grammar that the answer must match (:mod:`molink.text.grammar`); empty for none.
    grammar: Annotated[bytes, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)] = b""
    #: The endpoint's opaque name of the client, for fair shares.
    client: Annotated[str, msgspec.Meta(max_length=MAX_CLIENT)] = ""
    #: Priority among this client's requests; the lowest is served first.
    priority: Priority = 0
    #: Seconds that it may wait for admission; 0: the scheduler's default.
    max_queue_s: QueueSeconds = 0.0
    #: Seconds after which the endpoint cuts the answer off; 0: no deadline.
    deadline_s: QueueSeconds = 0.0
    #: Only requests with the same salt share cached prefixes; see :mod:`molinkd.api.cache_salts`.
    cache_salt: Annotated[bytes, msgspec.Meta(max_length=MAX_CACHE_SALT)] = b""
    #: Adapter of ``model`` to use; empty for none.
    adapter: AdapterName = ""
    #: Images of the prompt in order; their rows have the ids of :attr:`.ImageInput.row_ids`.
    images: Annotated[tuple[ImageInput, ...], msgspec.Meta(max_length=MAX_TILES)] = ()

    @property
    def cache_scope(self) -> bytes:
        """Only requests of the same scope share cached prefixes: the salt, and the adapter.

        Adapters change keys and values, so an adapter's scope never equals a salt.
        """
        if not self.adapter:
            return self.cache_salt
        name = blake2b(self.adapter.encode(), digest_size=_ADAPTER_SCOPE_BYTES).digest()
        return blake2b(self.cache_salt, digest_size=_ADAPTER_SCOPE_BYTES, key=name).digest()

    def without_payloads(self) -> "Request":
        """Return the request as a :class:`Submit` carries it; the rest travels as payloads."""
        return msgspec.structs.replace(self, prompt_token_ids=(), grammar=b"", images=())


class Submit(LeanMessage, frozen=True, tag="submit"):
    """An endpoint submits a request to a scheduler; its ids follow as :class:`PromptFragment`.

    The pixels of its ``images`` follow as :class:`PixelFragment`.

    ``key`` is the endpoint's id of this submission. ``num_tokens`` ids follow: the first
    ``num_prompt_tokens`` are the prompt, the others the part of the answer generated in earlier
    epochs. The payload (``u8 [n]``), if there is one, is the grammar.
    """

    pipeline: Text
    epoch: Epoch
    key: Text
    #: The request without its prompt, grammar and images.
    request: Request
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    num_prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    #: Seconds since the client asked.
    elapsed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    #: Maximum tokens that the scheduler may be ahead of the endpoint's credit.
    credit_window: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 256
    payload: Payload | None = None
    #: Version of the endpoint's last :class:`CacheUpdate` in this epoch (-1: none); ``None``: it
    #: needs no updates.
    cache_version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] | None = None
    images: Annotated[tuple[ImageSpan, ...], msgspec.Meta(max_length=MAX_TILES)] = ()


class PromptFragment(LeanMessage, frozen=True, tag="prompt"):
    """Ids of a submitted request from ``first`` on (payload ``i32 [n]``)."""

    key: Text
    first: Count
    payload: Payload


class PixelFragment(LeanMessage, frozen=True, tag="pixels"):
    """Pixels of a submitted request's images, one after another, from byte ``first`` on.

    The payload is ``u8 [n]``. The endpoint sends at most :data:`PIXEL_WINDOW` bytes beyond the
    position that :class:`PixelsReceived` acknowledges.
    """

    key: Text
    first: Count
    payload: Payload


class PixelsReceived(LeanMessage, frozen=True, tag="pixels_received"):
    """The scheduler has all pixels below byte ``position``."""

    epoch: Epoch
    key: Text
    position: Count


class Cancel(LeanMessage, frozen=True, tag="cancel"):
    """Stop a request whose client has disconnected or needs no more tokens."""

    key: Text


class Credit(LeanMessage, frozen=True, tag="credit"):
    """The client has consumed everything below ``position``."""

    key: Text
    position: Count


FinishReason = Literal["stop", "length"]
RejectReason = Literal["overloaded", "too_long", "epoch", "failed", "invalid"]


class OutputToken(LeanMessage, frozen=True, tag=False):
    """A token for a request's endpoint; ``finish_reason`` is set on the last one.

    ``cached_tokens`` counts prompt tokens from the prefix cache; ``top`` pairs ids and logprobs.
    """

    epoch: Epoch
    key: Text
    position: Count
    token: Index
    logprob: float = float("nan")
    top: Annotated[tuple[tuple[Index, float], ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0


class PooledOutput(LeanMessage, frozen=True, tag="embedding"):
    """A row of an embedding model (payload ``f32 [hidden]``); its request's token follows."""

    epoch: Epoch
    key: Text
    payload: Payload


class CacheUpdate(LeanMessage, frozen=True):
    """Blocks added to and evicted from a scheduler's prefix cache (:class:`CacheReport`).

    The payload has 8-byte digests (little-endian): ``num_added`` added ones, then evicted ones.
    """

    version: Count
    is_full: bool
    num_added: Index
    capacity: Count = 0
    costs: RequestCosts | None = None


class OutputTokens(LeanMessage, frozen=True, tag="tokens"):
    """Tokens of one micro-batch for one endpoint, for one or more requests.

    ``cache`` (payload ``u8 [8n]``) is for endpoints that asked with :attr:`Submit.cache_version`.
    """

    tokens: Annotated[tuple[OutputToken, ...], msgspec.Meta(min_length=1, max_length=MAX_SLICES)]
    cache: CacheUpdate | None = None
    payload: Payload | None = None


class Rejected(LeanMessage, frozen=True, tag="rejected"):
    """A request was rejected or can't continue; ``retry_after`` (seconds) goes with ``overloaded``.

    ``epoch`` and ``failed`` are transient: the endpoint resubmits.
    """

    epoch: Epoch
    key: Text
    reason: RejectReason
    message: Sentence
    retry_after: float = 0.0


#: All messages between endpoints and schedulers.
ServingMessage = (
    Submit
    | PromptFragment
    | PixelFragment
    | PixelsReceived
    | Cancel
    | Credit
    | PooledOutput
    | OutputTokens
    | Rejected
)
