"""What each stage measures of itself: messages that go once round the ring."""

from typing import Annotated

import msgspec

from molink.facts.scalars import Index
from molink.facts.slowdown import MAX_SLOWDOWN
from molink.wire.messages.base import LeanMessage


class LinkReport(LeanMessage, frozen=True, tag="link"):
    """What stage ``stage`` has measured of its outgoing link; goes once round the ring.

    ``latency`` is one way in seconds, ``rate`` in bytes/s; 0 if unknown.
    """

    stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    latency: Annotated[float, msgspec.Meta(ge=0, le=600)]
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class SlowdownReport(LeanMessage, frozen=True, tag="pace"):
    """How much longer the steps of stage ``stage`` take than its profile; goes once round the ring.

    A factor for ``decode`` steps and one for ``prefill`` steps.
    """

    stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    decode: Annotated[float, msgspec.Meta(ge=1 / MAX_SLOWDOWN, le=MAX_SLOWDOWN)]
    prefill: Annotated[float, msgspec.Meta(ge=1 / MAX_SLOWDOWN, le=MAX_SLOWDOWN)]


class HostMemoryReport(LeanMessage, frozen=True, tag="host"):
    """How many KV blocks fit into the host memory of stage ``stage``; goes once round the ring.

    A block takes ``block_s`` seconds to be copied one way.
    """

    stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    blocks: Index
    block_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
