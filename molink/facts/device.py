"""A device as its daemon measured it."""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import NarrowDType
from molink.facts.scalars import Count, Index, Text


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device as the daemon measured it; ``kind`` is ``cpu`` or ``cuda``.

    ``memory`` is what stages may use, in bytes (after the user's budget); ``read_rate`` the
    measured bytes/s at which a decode step streams weights (0 = not measured yet).
    """

    kind: Literal["cpu", "cuda"]
    index: Index = 0
    name: Text
    memory: Count
    read_rate: float = 0.0
    #: Whether it computes in bf16; if not, a CPU computes 16-bit models in f32.
    bf16: bool = True
    #: Weights that stay what they are where it computes in f32.
    narrow_dtypes: Annotated[tuple[NarrowDType, ...], msgspec.Meta(max_length=2)] = ()
    #: Whether it multiplies by weights of few bits: these take no more room than in their files.
    has_block_kernels: bool = False
    #: What its attention wants the positions of a KV block to be a multiple of.
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    #: Bytes that a draft model takes of ``memory`` while the first stage is there.
    can_draft: Count = 0
