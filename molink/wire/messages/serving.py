"""Messages between daemons and heads: requests, their tokens, and what becomes of them."""

from typing import Annotated, Literal

import msgspec

from molink.facts.request_costs import RequestCosts
from molink.facts.scalars import Count, Index, Sentence, Text
from molink.wire.messages.base import LeanMessage, Payload
from molink.wire.messages.data_plane import MAX_SLICES, MAX_TOP_LOGPROBS, Epoch, SamplingParams

#: Token ids that end an answer; models have a few of their own.
MAX_STOP_IDS = 64
#: Characters of a client's name.
MAX_CLIENT = 32

#: As vLLM's API has it: the least goes first.
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
#: For how long a request may wait to be admitted; 0 = not said.
QueueSeconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Submit(LeanMessage, frozen=True, tag="submit"):
    """A daemon asks a head to serve a request; the prompt's ids follow in :class:`PromptFragment`
    parts.

    ``key`` is the daemon's own id of the request. ``num_tokens`` is how many ids are to come, of
    which the first ``prompt_tokens`` are the prompt and the others were generated in an earlier
    epoch. ``max_tokens`` counts tokens still to be generated. Its payload (``u8 [n]``), where there
    is one, is the grammar that the answer is held to.
    """

    pipeline: Text
    epoch: Epoch
    key: Text
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    sampling: SamplingParams
    stop_token_ids: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_STOP_IDS)] = ()
    #: Tokens the head may be ahead of what the daemon has credited.
    credit_window: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 256
    payload: Payload | None = None
    #: What the daemon knows of the head's prefix cache, by the version of the last
    #: :class:`CacheUpdate` of this epoch (-1: nothing); ``None``: it need not be told.
    cache_version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] | None = None
    #: Whose request it is: the daemon's own word for one of its clients, which tells nothing else.
    client: Annotated[str, msgspec.Meta(max_length=MAX_CLIENT)] = ""
    #: Among the requests of that client; the least goes first.
    priority: Priority = 0
    #: Seconds that it may wait to be admitted; 0 = as the head has it.
    max_queue_s: QueueSeconds = 0.0
    #: Seconds within which its answer has to end; 0 = it may take any time.
    deadline_s: QueueSeconds = 0.0


class PromptFragment(LeanMessage, frozen=True, tag="prompt"):
    """Ids of a submitted request from ``first`` on (payload ``i32 [n]``)."""

    key: Text
    first: Count
    payload: Payload


class Cancel(LeanMessage, frozen=True, tag="cancel"):
    """Stop a request: its client has gone, or has all it wanted."""

    key: Text


class Credit(LeanMessage, frozen=True, tag="credit"):
    """The client has taken everything below ``position``."""

    key: Text
    position: Count


FinishReason = Literal["stop", "length"]
RejectReason = Literal["overloaded", "too_long", "epoch", "failed", "invalid"]


class OutputToken(LeanMessage, frozen=True, tag=False):
    """A token for a request's daemon; ``finish_reason`` is set on the last one.

    ``cached_tokens`` is how many prompt tokens came from the prefix cache; ``top`` pairs ids and
    logprobs.
    """

    epoch: Epoch
    key: Text
    position: Count
    token: Index
    logprob: float = float("nan")
    top: Annotated[tuple[tuple[Index, float], ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0


class CacheUpdate(LeanMessage, frozen=True):
    """What has come into a head's prefix cache and left it: a :class:`CacheReport` on its way.

    The payload has digests of 8 bytes each (little-endian): ``num_added`` ones, then those evicted.
    """

    version: Count
    is_full: bool
    num_added: Index
    capacity: Count = 0
    costs: RequestCosts | None = None


class OutputTokens(LeanMessage, frozen=True, tag="tokens"):
    """Tokens of one micro-batch for one daemon, of several requests.

    ``cache`` (payload ``u8 [8n]``) is for those who asked for it with :attr:`Submit.cache`.
    """

    tokens: Annotated[tuple[OutputToken, ...], msgspec.Meta(min_length=1, max_length=MAX_SLICES)]
    cache: CacheUpdate | None = None
    payload: Payload | None = None


class Rejected(LeanMessage, frozen=True, tag="rejected"):
    """A request was not taken, or can't go on. ``retry_after`` (seconds) goes with ``overloaded``.

    ``epoch`` and ``failed`` are transient as seen by a client: the daemon resubmits.
    """

    epoch: Epoch
    key: Text
    reason: RejectReason
    message: Sentence
    retry_after: float = 0.0


#: What daemons and heads say to each other.
ServingMessage = Submit | PromptFragment | Cancel | Credit | OutputTokens | Rejected
