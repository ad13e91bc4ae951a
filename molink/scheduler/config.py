"""Configuration of a scheduler."""

import math
from dataclasses import dataclass

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, MAX_LOOKAHEAD, DraftModelFacts
from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.facts.settings import PREEMPTION_MODES, PreemptionMode
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

#: Tokens of growth reserved for each running request before another is admitted. With fewer, the
#: new request would soon be preempted and its prefill lost.
GROWTH_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one pipeline's scheduler.

    ``num_blocks`` KV blocks of ``block_size`` tokens exist at every stage. ``micro_batches``
    (``K``) bounds decode volumes and, separately, prefill volumes in flight; 0 lets
    :mod:`molink.scheduler.micro_batches` choose for ``num_stages`` stages with ``row_bytes`` per
    transferred row. ``prefill_only_batches`` allows further prefill volumes without decode rows.
    ``max_num_batched_tokens`` bounds the rows of a prefill volume (0:
    :mod:`molink.scheduler.chunk_size` chooses by the stages' ``profiles``). Up to ``max_num_seqs``
    requests hold blocks and up to ``max_queue_len`` wait; ``max_model_len`` bounds prompt and
    answer together. ``prefix_cache`` keeps blocks of finished requests for requests with the same
    prefix. Requests that may exceed ``short_context`` tokens (0: unlimited) share blocks among
    themselves only. A decode row is followed by up to ``num_speculative_tokens`` drafts
    (:data:`AUTO_DRAFTS`: as many as pay off), and up to ``lookahead_volumes`` volumes continue
    drafts in flight. ``draft_model`` proposes drafts if there is one. ``preemption_mode`` decides
    what happens to preempted KV. ``max_queue_s`` is the default limit in seconds of a request's
    wait for admission; 0 means none. Each request holds one of ``state_slots`` states of recurrent
    layers at every stage (0: the model needs none). With a prefix cache, free slots keep snapshots;
    a chunk is split for a snapshot that saves at least ``min_snapshot_rows`` rows. With
    ``whole_images`` no chunk ends within an image, so chunks may be larger.
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
    state_slots: int = 0
    min_snapshot_rows: int = 64
    whole_images: bool = False

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
            "state_slots": (0, 1 << 16),
            "min_snapshot_rows": (1, 1 << 24),
        }
        for name, (minimum, maximum) in bounds.items():
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise UsageError(f"{name} must be from {minimum} to {maximum}, not {value}")
        if self.preemption_mode not in PREEMPTION_MODES:
            choices = ", ".join(PREEMPTION_MODES)
            raise UsageError(
                f"preemption_mode must be one of {choices}, not {self.preemption_mode!r}"
            )
        if self.state_slots:
            self._check_states()

    def _check_states(self) -> None:
        """Check that no recurrent state would be swapped out, or have drafts behind drafts."""
        if self.lookahead_volumes or self.preemption_mode != "recompute":
            raise UsageError("a model with recurrent layers can't have lookahead or swapping")

    @property
    def max_request_tokens(self) -> int:
        """Maximum tokens of a request; the last sampled token needs no KV."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    @property
    def max_prefill_only_rows(self) -> int:
        """Prefill rows in flight up to which prefill-only chunks may be sent.

        All of them may queue at one stage, which has room for the largest chunks of ``2N``
        micro-batches.
        """
        return 2 * self.num_stages * MAX_CHUNK_ROWS

    @property
    def has_mtp_drafts(self) -> bool:
        """Whether the last stage has an MTP layer whose tokens are used as drafts."""
        predicts = bool(self.profiles) and self.profiles[-1].mtp_s > 0
        return predicts and self.num_speculative_tokens != 0

    def growth_blocks(self, running: int) -> int:
        """Return the blocks to reserve for the growth of ``running`` requests on an admission."""
        return math.ceil(running * GROWTH_TOKENS / self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks for the KV of ``tokens`` tokens."""
        return -(-tokens // self.block_size)
