"""Devices, as measured by their daemons."""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import NarrowDType
from molink.facts.scalars import Count, Index, Text


class ExpertHost(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU of a device's PC, and the host memory that may hold experts.

    Fields are as in :class:`Device`.
    """

    memory: Count
    read_rate: float = 0.0
    bf16: bool = True
    narrow_dtypes: Annotated[tuple[NarrowDType, ...], msgspec.Meta(max_length=2)] = ()
    has_block_kernels: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device; ``kind`` is ``cpu`` or ``cuda``.

    ``memory`` is the number of bytes that stages may use within the user's budget. ``read_rate`` is
    the measured rate in bytes/s at which a decode step reads weights (0: not measured).
    """

    kind: Literal["cpu", "cuda"]
    index: Index = 0
    name: Text
    memory: Count
    read_rate: float = 0.0
    #: Instruction set and threads of a CPU.
    instructions: Text = ""
    threads: Count = 0
    #: Whether it computes in bf16. A CPU without bf16 computes 16-bit models in f32.
    bf16: bool = True
    #: 16-bit weight types that it keeps while computing in f32.
    narrow_dtypes: Annotated[tuple[NarrowDType, ...], msgspec.Meta(max_length=2)] = ()
    #: Whether it multiplies by block-quantized weights, which then take no more memory than on
    #: disk. On a GPU its last check must have passed.
    has_block_kernels: bool = False
    #: Whether attention on a GPU reads KV pages in place, so that steps need no memory for copies;
    #: its last check must have passed, too.
    reads_pages: bool = False
    #: KV blocks must be a multiple of this many positions.
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    #: Bytes of ``memory`` that a draft model takes, in addition to the first stage.
    draft_bytes: Count = 0
    #: Host for experts that don't fit on the device; ``None`` if there is none.
    expert_host: ExpertHost | None = None
