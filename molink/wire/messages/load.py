"""Load of stages, links and schedulers: figures for users that no decision depends on.

They are part of a peer's report and all that others see of its running stages. A request shows its
origin and progress, never its content.
"""

from typing import Annotated, Literal

import msgspec

from molink.facts.scalars import Count, Index, Text
from molink.wire.messages.base import LeanMessage

#: Bounds of one report, whose header has at most 4 KiB.
MAX_STAGES = 8
MAX_SCHEDULERS = 2
MAX_REQUESTS = 12
MAX_QUEUES = 16

Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
#: Characters of a peer id.
MAX_PEER_ID = 32
PeerId = Annotated[str, msgspec.Meta(max_length=MAX_PEER_ID)]


class StageLoad(LeanMessage, frozen=True):
    """A stage and its link to the next one over the last seconds.

    ``busy`` is the share of time with a running step, ``bubbles`` the share of idle time while
    requests lived. ``weight_bytes`` and ``kv_bytes`` are on its device. The link has a one-way
    ``latency_us`` in microseconds, a ``rate`` in bytes/s (0: unknown), and unsent (``queued``) and
    unacknowledged (``in_flight``) bytes of the decode and the bulk channel.
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
    """A request at a scheduler; ``peer`` is the endpoint that received it.

    ``computed`` of its ``prompt`` and ``generated`` tokens have passed every stage. ``token_rate``
    is tokens per 1000 s since the first token, ``age`` seconds since arrival at this scheduler. A
    swapped request should return from host memory in ``resume_ms`` milliseconds (ENST).
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
    """A scheduler's KV blocks and requests, with details of the oldest ones.

    ``swapped`` of the ``waiting`` requests have their KV in host memory, which has ``host_blocks``;
    ``swap_fallbacks`` counts requests that found no room there and are recomputed.
    ``cached_percent`` is the share of prompt tokens that came from the prefix cache. ``queues``
    counts requests per queue of the policy, without trailing empty ones.
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
    """The load of one peer."""

    stages: Annotated[tuple[StageLoad, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    schedulers: Annotated[tuple[SchedulerLoad, ...], msgspec.Meta(max_length=MAX_SCHEDULERS)] = ()
