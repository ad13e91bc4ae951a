"""Settings of a pipeline."""

from typing import Annotated, Literal, get_args

import msgspec

from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS
from molink.facts.dtypes import Compression
from molink.facts.scalars import Text

#: What happens to the KV of a preempted request. ``recompute``: it is dropped and computed again.
#: ``reactive-swap``: it moves to host memory when other requests lack blocks and returns when the
#: request is next; other requests wait meanwhile. ``proactive-swap``: it moves before other
#: requests lack blocks and returns ahead of time (FastServe, §4.2).
PreemptionMode = Literal["recompute", "reactive-swap", "proactive-swap"]
PREEMPTION_MODES: tuple[PreemptionMode, ...] = get_args(PreemptionMode)
#: Default bytes of host memory per stage, as vLLM's ``--swap-space``.
SWAP_SPACE = 4 << 30


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stage's worker serves.

    A daemon derives it from its own settings once and checks that the named policies exist.
    """

    #: Scheduling policy (``molink.scheduler.policies.create``).
    scheduling_policy: Text = "fcfs"
    #: What happens to the KV of a preempted request.
    preemption_mode: PreemptionMode = "recompute"
    #: Bytes of host memory per stage for swapped KV.
    swap_space: Annotated[int, msgspec.Meta(ge=0)] = SWAP_SPACE
    #: Maximum requests that hold KV blocks at a time, and maximum that may queue.
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    max_queue_len: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 256
    #: Default seconds that a request may wait for admission; 0: no limit.
    max_queue_time: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    #: Rows of a prefill chunk; 0: chosen from the stages' profiles.
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    #: Whether prefill chunks also run without decode rows while no stream waits for them.
    prefill_only_batches: bool = True
    #: Drafts per request and pass; -1: as many as pay off.
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=AUTO_DRAFTS, le=MAX_DRAFTS)] = (
        AUTO_DRAFTS
    )
    #: Whether KV of finished requests is kept for requests with the same prefix.
    prefix_cache: bool = True
    #: How a link shares its bandwidth (``molink.link.policies.create``).
    link_policy: Text = "adaptive"
    #: Whether a stage computes and forwards prompt rows while more are arriving.
    cut_through: bool = True
    #: How rows are packed on links if that pays off; ``int8`` loses precision.
    compression: Compression = "lossless"
    #: Whether idle links send padding while prompts are frequent, so that TCP keeps its window.
    keep_warm: bool = True
    #: Folder for recordings of link decisions; empty: no recordings.
    record: Annotated[str, msgspec.Meta(max_length=4096)] = ""
