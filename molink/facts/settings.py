"""How a pipeline serves, as its owner sets it."""

from typing import Annotated, Literal, get_args

import msgspec

from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS
from molink.facts.dtypes import Compression
from molink.facts.scalars import Text

#: ``recompute``: they are given up, and computed anew when its turn has come again.
#: ``reactive-swap``: they go to memory of the host when others lack blocks, and come back when it
#: is its turn; who needs the blocks waits meanwhile. ``proactive-swap``: they go before others lack
#: blocks, and come back before its turn (FastServe, §4.2).
PreemptionMode = Literal["recompute", "reactive-swap", "proactive-swap"]
PREEMPTION_MODES: tuple[PreemptionMode, ...] = get_args(PreemptionMode)
#: Host memory that a stage may use for it if nothing is said, in bytes: as vLLM's ``--swap-space``.
SWAP_SPACE = 4 << 30


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stage's worker is told of how to serve, beside what it has to hold and where.

    A daemon makes it from its settings once, and its workers read it as it is. Policies are known
    by name here; whoever makes it has seen to it that there are such policies.
    """

    #: Whose turn it is among requests (``molink.scheduler.policies.create``).
    scheduling_policy: Text = "fcfs"
    #: What becomes of the KV of a request that gives way to others.
    preemption_mode: PreemptionMode = "recompute"
    #: Bytes of host memory that a stage may use for that, where it isn't computed anew.
    swap_space: Annotated[int, msgspec.Meta(ge=0)] = SWAP_SPACE
    #: Requests that hold KV blocks at a time, and those that may queue.
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    max_queue_len: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 256
    #: Seconds that a request may wait to be admitted, if it doesn't say; 0 = as long as it takes.
    max_queue_time: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    #: Rows of a prefill chunk; 0 = as the measured profiles of the stages suggest.
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    #: Whether prefill chunks also go without decode rows, while no stream waits for them.
    prefill_only_batches: bool = True
    #: Tokens of each request that are guessed ahead and verified in one pass; -1 = as many as pay.
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=AUTO_DRAFTS, le=MAX_DRAFTS)] = (
        AUTO_DRAFTS
    )
    #: Whether the KV of requests that are over is kept for others that begin alike.
    prefix_cache: bool = True
    #: How links between stages share their bandwidth (``molink.link.policies.create``).
    link_policy: Text = "adaptive"
    #: Whether prompts' rows are computed and sent on while more of them are coming.
    cut_through: bool = True
    #: How rows are packed on the way to the next stage, where that pays; ``int8`` loses precision.
    compression: Compression = "lossless"
    #: Whether links send a little while prompts come often, so that TCP keeps its window, where it
    #: would forget it.
    keep_warm: bool = True
    #: Folder in which stages record the decisions of their links; empty = nothing is recorded.
    record: Annotated[str, msgspec.Meta(max_length=4096)] = ""
