"""How busy stages, links and heads are: figures for people, which decide nothing.

They travel with a peer's report and are all that others see of its stages at work. A request is
told by whose it is and how far it has got, never by what it says.
"""

from typing import Annotated, Literal

import msgspec

from molink.facts.scalars import Count, Index, Text
from molink.wire.messages.base import LeanMessage

#: Bounds of one peer's report: its header has 4 KiB for everything.
MAX_STAGES = 8
MAX_HEADS = 2
MAX_REQUESTS = 12
MAX_QUEUES = 16

Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
#: Characters of a peer's id.
MAX_OWNER = 32
Owner = Annotated[str, msgspec.Meta(max_length=MAX_OWNER)]


class StageLoad(LeanMessage, frozen=True):
    """A stage and its link to the next one, over the last seconds.

    ``busy`` is how much of the time it computed; ``bubbles`` how much of the time in which requests
    lived there it did not. ``weights`` and ``kv`` are bytes of its device's memory. Of the link:
    ``latency_us`` one way in microseconds, ``rate`` in bytes/s (0 = unknown), and the bytes that
    wait (``queued``) and that were sent but not acknowledged (``in_flight``), of the decode lane
    and of the bulk lane.
    """

    pipeline: Text
    stage: Index
    busy: Percent = 0
    bubbles: Percent = 0
    requests: Index = 0
    weights: Count = 0
    kv: Count = 0
    latency_us: Count = 0
    rate: Count = 0
    queued: tuple[Count, Count] = (0, 0)
    in_flight: tuple[Count, Count] = (0, 0)


class RequestNow(LeanMessage, frozen=True):
    """A request that a head serves; ``owner`` is the peer whose endpoint was asked.

    Of the ``prompt`` tokens and those ``generated``, ``computed`` are at every stage. ``pace`` is
    in tokens per 1000 s since its first token, ``age`` in seconds since it came to this head. One
    that is ``swapped`` should come back from host memory in ``turn_ms`` milliseconds (ENST).
    """

    owner: Owner
    state: Literal["waiting", "swapped", "prefill", "decode"]
    prompt: Count
    computed: Count = 0
    generated: Count = 0
    pace: Count = 0
    age: Count = 0
    turn_ms: Index = 0


class HeadLoad(LeanMessage, frozen=True):
    """What a pipeline's head does: its KV blocks, and its requests, the oldest of them by name.

    Of those ``waiting``, ``swapped`` have their KV in host memory, which has room for
    ``host_blocks``; so often there was none for one (``fallbacks``), which is computed anew. Its
    prefix cache had ``cached`` percent of the prompts' tokens so far. If its
    policy has ``queues``, so many requests are in each; those after the last one are empty.
    """

    pipeline: Text
    running: Index = 0
    waiting: Index = 0
    blocks: Index = 0
    used: Index = 0
    micro_batches: Index = 0
    requests: Annotated[tuple[RequestNow, ...], msgspec.Meta(max_length=MAX_REQUESTS)] = ()
    swapped: Index = 0
    host_blocks: Index = 0
    host_used: Index = 0
    cached: Percent = 0
    queues: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_QUEUES)] = ()
    fallbacks: Count = 0


class Load(LeanMessage, frozen=True):
    """All of that on one PC."""

    stages: Annotated[tuple[StageLoad, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    heads: Annotated[tuple[HeadLoad, ...], msgspec.Meta(max_length=MAX_HEADS)] = ()
