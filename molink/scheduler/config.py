"""The bounds that a head works within."""

import math
from dataclasses import dataclass

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, MAX_LOOKAHEAD, DraftModelFacts
from molink.facts.preemption import PREEMPTION_MODES, PreemptionMode
from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

#: Tokens that each running job should be able to grow by before a new one takes the last blocks;
#: with less, the new one would soon be preempted again and its prefill be lost.
GROWTH_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one pipeline's head.

    ``num_blocks`` KV blocks of ``block_size`` tokens at every stage; ``micro_batches`` (``K``)
    bounds decode volumes and, apart from them, prefill volumes in flight (0: as
    :mod:`molink.scheduler.micro_batches` decides for ``num_stages`` stages, between which a row
    takes ``row_bytes``); ``prefill_only_batches`` is whether prefill volumes may go beyond that, as
    :mod:`molink.scheduler.micro_batches` has it; ``max_num_batched_tokens`` rows of a prefill volume
    (0: as :mod:`molink.scheduler.chunk_size` decides by the stages' ``profiles``); ``max_num_seqs``
    requests that hold blocks and ``max_queue_len`` that queue; ``max_model_len`` tokens of a
    request, prompt and answer together. ``prefix_cache`` is whether the blocks of requests that are
    over are kept for others that begin with the same tokens. Requests that may come to more than
    ``short_context`` tokens (0: no such bound) share them among themselves only. A decode row is
    followed by up to ``num_speculative_tokens`` drafts (:data:`AUTO_DRAFTS`: as
    :mod:`molink.scheduler.speculation` decides). Up to ``lookahead_volumes`` volumes of drafts may
    go on from those in flight. ``draft_model`` may be asked for drafts where there is one. What
    becomes of the KV of who is preempted says ``preemption_mode``, as far as stages have host
    memory. A request that doesn't say for how long it may wait to be admitted may for
    ``max_queue_s`` seconds (0: for as long as it takes).
    """

    num_blocks: int
    block_size: int
    micro_batches: int
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 64
    max_queue_len: int = 256
    max_model_len: int = 1 << 20
    prefix_cache: bool = True
    short_context: int = 0
    profiles: tuple[Profile, ...] = ()
    num_stages: int = 1
    row_bytes: int = 0
    prefill_only_batches: bool = True
    num_speculative_tokens: int = 0
    lookahead_volumes: int = 0
    draft_model: DraftModelFacts | None = None
    preemption_mode: PreemptionMode = "recompute"
    max_queue_s: float = 0.0

    def __post_init__(self) -> None:
        bounds = {
            "num_blocks": (1, 1 << 31),
            "block_size": (1, 1 << 16),
            "micro_batches": (0, MAX_MICRO_BATCHES),
            "num_stages": (1, MAX_MICRO_BATCHES // 2),
            "max_num_batched_tokens": (0, 1 << 16),
            "max_num_seqs": (1, 1 << 16),
            "max_queue_len": (0, 1 << 20),
            "max_model_len": (1, 1 << 24),
            "short_context": (0, 1 << 24),
            "num_speculative_tokens": (AUTO_DRAFTS, MAX_DRAFTS),
            "lookahead_volumes": (0, MAX_LOOKAHEAD),
            "max_queue_s": (0, 86400),
        }
        for name, (minimum, maximum) in bounds.items():
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise UsageError(f"{name} must be from {minimum} to {maximum}, not {value}")
        if self.preemption_mode not in PREEMPTION_MODES:
            choices = ", ".join(PREEMPTION_MODES)
            raise UsageError(f"preemption_mode is one of {choices}, not {self.preemption_mode!r}")

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request that fits: the last one sampled needs no KV."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    @property
    def max_prefill_only_rows(self) -> int:
        """Prefill rows in flight up to which chunks may go without decode rows.

        All could wait at one stage, which has room for the largest chunks of ``2N`` micro-batches.
        """
        return 2 * self.num_stages * MAX_CHUNK_ROWS

    def growth_blocks(self, running: int) -> int:
        """Blocks that so many running jobs should be able to grow by before one is admitted."""
        return math.ceil(running * GROWTH_TOKENS / self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of ``tokens`` tokens."""
        return -(-tokens // self.block_size)
