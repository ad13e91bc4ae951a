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
MAX_SCHEDULERS = 2
MAX_REQUESTS = 12
MAX_QUEUES = 16

Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
#: Characters of a peer's id.
MAX_PEER_ID = 32
PeerId = Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID)]


class StageLoad(LeanMessage, frozen=True):
    """A stage and its link to the next one, over the last seconds.

    ``busy`` is how much of the time it computed; ``bubbles`` how much of the time in which requests
    lived there it did not. ``weight_bytes`` and ``kv_bytes`` are bytes of its device's memory. Of
    the link: ``latency_us`` one way in microseconds, ``rate`` in bytes/s (0 = unknown), and the
    bytes that wait (``queued``) and that were sent but not acknowledged (``in_flight``), of the
    decode channel and of the bulk channel.
    """

    pipeline: Text
    stage: Index
    busy: Percent = 0
    bubbles: Percent = 0
    requests: Index = 0
    weight_bytes: Count = 0
    kv_bytes: Count = 0
    latency_us: Count = 0
    rate: Count = 0
    queued: tuple[Count, Count] = (0, 0)
    in_flight: tuple[Count, Count] = (0, 0)


class RequestLoad(LeanMessage, frozen=True):
    """A request that a head serves; ``peer`` is the peer whose endpoint was asked.

    Of the ``prompt`` tokens and those ``generated``, ``computed`` are at every stage.
    ``token_rate`` is in tokens per 1000 s since its first token, ``age`` in seconds since it came
    to this head. One that is ``swapped`` should come back from host memory in ``resume_ms``
    milliseconds (ENST).
    """

    peer: PeerId
    state: Literal["waiting", "swapped", "prefill", "decode"]
    prompt: Count
    computed: Count = 0
    generated: Count = 0
    token_rate: Count = 0
    age: Count = 0
    resume_ms: Index = 0


class SchedulerLoad(LeanMessage, frozen=True):
    """What a pipeline's head does: its KV blocks, and its requests, the oldest of them by name.

    Of those ``waiting``, ``swapped`` have their KV in host memory, which has room for
    ``host_blocks``; so often there was none for one (``swap_fallbacks``), which is computed anew.
    Its prefix cache had ``cached_percent`` percent of the prompts' tokens so far. If its policy has
    ``queues``, so many requests are in each; those after the last one are empty.
    """

    pipeline: Text
    running: Index = 0
    waiting: Index = 0
    blocks: Index = 0
    used_blocks: Index = 0
    micro_batches: Index = 0
    requests: Annotated[tuple[RequestLoad, ...], msgspec.Meta(max_length=MAX_REQUESTS)] = ()
    swapped: Index = 0
    host_blocks: Index = 0
    used_host_blocks: Index = 0
    cached_percent: Percent = 0
    queues: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_QUEUES)] = ()
    swap_fallbacks: Count = 0


class PeerLoad(LeanMessage, frozen=True):
    """All of that on one PC."""

    stages: Annotated[tuple[StageLoad, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    schedulers: Annotated[tuple[SchedulerLoad, ...], msgspec.Meta(max_length=MAX_SCHEDULERS)] = ()
