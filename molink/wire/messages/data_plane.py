"""The data plane between the stages of a pipeline.

A *seq* is the sequence number that stage 0 assigns to each volume and control message; an *epoch*
is a generation of the pipeline; a *channel* is one of a link's two connections. Positions count a
request's tokens from 0, prompt included.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from molink.facts.drafts import MAX_DRAFTS
from molink.facts.images import MAX_TILES, ImageSpan
from molink.facts.model import MAX_ADAPTERS
from molink.facts.profile import MAX_SLOWDOWN
from molink.facts.scalars import Count, Index, Text
from molink.wire.messages.base import LeanMessage, Payload


class LinkReport(LeanMessage, frozen=True, tag="link"):
    """The measured outgoing link of stage ``stage``; sent once round the ring.

    ``latency`` is one way in seconds, ``rate`` in bytes/s; 0 if unknown.
    """

    stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    latency: Annotated[float, msgspec.Meta(ge=0, le=600)]
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class SlowdownReport(LeanMessage, frozen=True, tag="slowdown"):
    """Ratio of step times of stage ``stage`` to its profile, by kind; sent once round the ring."""

    stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    decode: Annotated[float, msgspec.Meta(ge=1 / MAX_SLOWDOWN, le=MAX_SLOWDOWN)]
    prefill: Annotated[float, msgspec.Meta(ge=1 / MAX_SLOWDOWN, le=MAX_SLOWDOWN)]


class HostMemoryReport(LeanMessage, frozen=True, tag="host"):
    """KV blocks that fit the host memory of stage ``stage``; sent once round the ring.

    ``block_s`` is the time to copy a block one way, in seconds.
    """

    stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    blocks: Index
    block_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0


#: Maximum slices of a volume, whose header must stay below 4 KiB.
MAX_SLICES = 128
#: Maximum volumes of one kind (prefill or decode) that a scheduler may have in flight.
MAX_MICRO_BATCHES = 64
#: Maximum entries of a logit bias; also bounded by the header.
MAX_LOGIT_BIAS = 256
#: Bounds of a repetition penalty; float32 logits are divided by it.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
#: Higher temperatures sample almost uniformly.
MAX_TEMPERATURE = 100.0
#: Maximum alternatives to a token, as in OpenAI's API.
MAX_TOP_LOGPROBS = 20
#: Maximum blocks per swap, whose source and target ids must fit one message.
MAX_SWAP_BLOCKS = 30_000
#: Maximum bytes of a grammar, which must fit one message.
MAX_GRAMMAR_BYTES = 128 * 1024

Epoch = Count
Seq = Count
RequestId = Index
#: -1: none.
OptionalIndex = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
RepetitionPenalty = Annotated[
    float, msgspec.Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
]
#: Added to a token's logit; range of OpenAI's API.
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class Channel(IntEnum):
    """The two connections of a link: decode rows and control messages, or prefill rows in bulk."""

    DECODE = 0
    BULK = 1


class SamplingParams(LeanMessage, frozen=True, tag=False):
    """How the last stage samples tokens; parameters of OpenAI's and vLLM's APIs.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``min_p`` 0 are off. ``seed`` is always set (at
    random by default), so a resubmitted request continues unchanged. ``logprobs`` is -1 for none,
    else the number of reported alternatives.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Index = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: Count = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    logprobs: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_LOGPROBS)] = -1
    logit_bias: Annotated[
        tuple[tuple[Index, Bias], ...], msgspec.Meta(max_length=MAX_LOGIT_BIAS)
    ] = ()
    #: Tokens whose logprobs are reported instead of the likeliest ones', with ``logprobs``.
    logprob_token_ids: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)] = ()

    @property
    def needs_history(self) -> bool:
        """Whether the last stage needs all previous tokens, to recompute penalties."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


# --- between stages, each inside a numbered Frame -----------------------------------------------


class Admit(LeanMessage, frozen=True, tag="admit"):
    """Admits a request. Sent once, which keeps decode frames small."""

    seq: Seq
    request: RequestId
    sampling_params: SamplingParams
    #: Tokens of the client's prompt; later ones were generated.
    prompt_tokens: Count
    #: Maximum tokens of the request; LongRoPE rotates all of its keys by this length.
    max_positions: Count = 0
    #: Slot in which recurrent layers keep the request's state.
    state_slot: Index = 0
    #: Number of the request's adapter among the model's, from 1; 0 for none.
    adapter: Annotated[int, msgspec.Meta(ge=0, le=MAX_ADAPTERS)] = 0
    #: Slot from which the state is copied before the first rows, on a prefix cache hit; -1: none.
    copy_from_state: OptionalIndex = -1


class History(LeanMessage, frozen=True, tag="history"):
    """Tokens of a request from position ``first`` (payload ``i32 [n]``).

    Sent after :class:`Admit`, only for penalties or if the last stage has an MTP layer. Positions
    from ``Admit.prompt_tokens`` on count as generated; a resubmitted request has some.
    """

    seq: Seq
    request: RequestId
    first: Count
    payload: Payload


class Grammar(LeanMessage, frozen=True, tag="grammar"):
    """The grammar that constrains a request's answer (payload ``u8 [n]``), for the last stage.

    Sent after :class:`Admit`, before any rows and before :class:`History`. If part of the answer is
    already known, the request also gets a :class:`History`, which the last stage replays.
    """

    seq: Seq
    request: RequestId
    payload: Payload


class PromptImages(LeanMessage, frozen=True, tag="images"):
    """Spans of a prompt's images, in order.

    If they are ``whole``, a step has either all uncached rows of an image or none. Sent after
    :class:`Admit` and before any rows. The first stage, whose scheduler issues it, gets the images'
    rows with it.
    """

    seq: Seq
    request: RequestId
    spans: Annotated[tuple[ImageSpan, ...], msgspec.Meta(min_length=1, max_length=MAX_TILES)]
    whole: bool = False


class BlockTable(LeanMessage, frozen=True, tag="table"):
    """The first KV blocks of a request's block table (payload ``i32 [n]``), in order.

    Sent after :class:`Admit` and before any rows on a prefix cache hit; rows start after the cached
    tokens.
    """

    seq: Seq
    request: RequestId
    payload: Payload


class RequestSlice(LeanMessage, frozen=True, tag=False):
    """Consecutive rows of one request in a volume: tokens ``start … start + count - 1``.

    The last rows may be ``drafts``, guesses of tokens that are not sampled yet. The last stage
    samples from the row before them and from each draft row while the sampled tokens equal the
    drafts. If all rows are drafts, the slice is a *lookahead*: the token before them was not yet
    sampled when they were issued, and the last stage samples from them only if they continue the
    sampled tokens.
    """

    request: RequestId
    start: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    #: The latest earlier ``seq`` that writes or releases a block of these rows.
    after_seq: Seq
    #: KV blocks appended to the block table before these rows run.
    blocks: tuple[Index, ...] = ()
    #: Whether the last stage samples from the last row.
    sample: bool = False
    #: On a partial prefix cache hit, the block from which the positions before ``start`` are first
    #: copied into this request's block; -1: none.
    copy_from_block: OptionalIndex = -1
    #: Draft tokens of the last rows, or of all rows. Only for sampled decode rows.
    drafts: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_DRAFTS)] = ()

    @property
    def is_lookahead(self) -> bool:
        """Whether it has drafts only: the token before it was unknown when it was issued."""
        return len(self.drafts) == self.count

    @property
    def verified_drafts(self) -> tuple[int, ...]:
        """The drafts that are compared with tokens sampled from the slice's own rows."""
        return self.drafts[1:] if self.is_lookahead else self.drafts

    def continues_from(self, position: int, token: int) -> bool:
        """Whether its rows are valid if ``token`` at ``position`` is the last sampled one."""
        return not self.is_lookahead or (self.start, self.drafts[0]) == (position, token)


class StateCopy(LeanMessage, frozen=True, tag=False):
    """Copy a request's recurrent state after its first ``end`` tokens to slot ``target``."""

    request: RequestId
    end: Index
    target: Index


class Volume(LeanMessage, frozen=True, tag="volume"):
    """Activations of one micro-batch's decode rows, or of one prefill chunk.

    The payload has the first ``n`` of ``sum(count)`` rows, ``[n, hidden]``; :class:`VolumeFragment`
    messages on the same channel have the others. The first stage's input is token ids, without a
    payload.
    """

    seq: Seq
    prefill: bool
    slices: Annotated[tuple[RequestSlice, ...], msgspec.Meta(min_length=1, max_length=MAX_SLICES)]
    payload: Payload
    #: Whether stages may run decode rows between a chunk's layers, see
    #: :mod:`molink.ring.interleaving`.
    interleaved: bool = False
    #: State copies for the prefix cache, at the ends of slices.
    state_copies: Annotated[tuple[StateCopy, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()
    #: Maximum tokens that the last stage predicts after each sampled one, while the probability
    #: that all are right is at least ``min_probability``.
    max_mtp_drafts: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFTS)] = 0
    min_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    @property
    def count(self) -> int:
        """Number of rows of all slices."""
        slices = self.slices
        return slices[0].count if len(slices) == 1 else sum(each.count for each in slices)

    @property
    def context(self) -> float:
        """Tokens before a slice, averaged over rows."""
        slices = self.slices
        if len(slices) == 1:
            return slices[0].start
        return sum(each.start * each.count for each in slices) / self.count


class VolumeFragment(LeanMessage, frozen=True, tag="fragment"):
    """More rows of the volume ``seq``, from row ``first`` on."""

    seq: Seq
    first: Index
    payload: Payload


class Release(LeanMessage, frozen=True, tag="release"):
    """Ends a request (finished, cancelled or preempted) after ``after_seq``.

    Rows of the request that arrive later are dropped. Once this message has gone round the ring,
    every stage has completed it, and the scheduler may reuse the request's blocks. ``pending_seqs``
    lists the other volumes of the request that had not come back. All are listed, since a stage may
    drop, and so complete, the last one before an earlier one arrives.
    """

    seq: Seq
    request: RequestId
    after_seq: Seq
    pending_seqs: Annotated[tuple[Seq, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)] = ()


class SwapOut(LeanMessage, frozen=True, tag="swap_out"):
    """Copies blocks of a request to host memory before its :class:`Release`.

    The payload is ``i32 [2, n]``: ``n`` blocks of its table, then the target host blocks. The
    request has no rows in flight.
    """

    seq: Seq
    request: RequestId
    payload: Payload


class SwapIn(LeanMessage, frozen=True, tag="swap_in"):
    """Fills blocks of a request's table from host memory.

    Sent after :class:`BlockTable` and before any rows. The payload is as in :class:`SwapOut`;
    ``swap_out_seq`` is the message that has filled the host blocks.
    """

    seq: Seq
    request: RequestId
    swap_out_seq: Seq
    payload: Payload


class Tombstone(LeanMessage, frozen=True, tag="tombstone"):
    """Completes a volume all of whose rows were dropped."""

    seq: Seq


class TopLogprobs(LeanMessage, frozen=True, tag="top"):
    """Alternatives at a position; precedes the :class:`SamplerOutput` with its token."""

    request: RequestId
    position: Count
    tokens: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)]
    logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)]


class PooledRow(LeanMessage, frozen=True, tag="pooled"):
    """The normed row before ``position`` (payload ``f32 [hidden]``), of an embedding model.

    Precedes the :class:`SamplerOutput` with its token, which has no meaning.
    """

    request: RequestId
    position: Count
    payload: Payload


class SampledId(LeanMessage, frozen=True, tag=False):
    """A sampled token at its ``position``; ``logprob`` is NaN unless requested."""

    request: RequestId
    position: Count
    token: Index
    logprob: float = float("nan")


class ForcedTokens(LeanMessage, frozen=True, tag=False):
    """The only tokens that a request's grammar allows after its last ``SampledId``."""

    request: RequestId
    tokens: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=MAX_DRAFTS)]


class MtpDrafts(LeanMessage, frozen=True, tag=False):
    """The last stage's drafts after the last ``SampledId`` of a request.

    ``percents`` has the probability of each draft if the previous ones are right.
    """

    request: RequestId
    tokens: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=MAX_DRAFTS)]
    percents: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=100)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_DRAFTS),
    ]


class SamplerOutput(LeanMessage, frozen=True, tag="sampled"):
    """Completes volume ``seq`` at the last stage; ``sampled`` has a token per sampled slice.

    A slice with drafts yields the accepted drafts in order and the token after them; a wrong
    lookahead slice yields nothing. ``failed`` lists requests with unusable logits (NaN). Two fields
    are hints: ``forced`` has drafts that are certainly right, ``mtp_drafts`` has drafts of an MTP
    layer.
    """

    seq: Seq
    sampled: Annotated[tuple[SampledId, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()
    failed: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()
    forced: Annotated[tuple[ForcedTokens, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()
    mtp_drafts: Annotated[tuple[MtpDrafts, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()


class Padding(LeanMessage, frozen=True, tag="probe"):
    """Meaningless bytes (payload ``u8 [n]``) that measure a link's rate or keep it warm."""

    payload: Payload


RingMessage = (
    Admit
    | History
    | Grammar
    | PromptImages
    | BlockTable
    | Volume
    | VolumeFragment
    | Release
    | SwapOut
    | SwapIn
    | Tombstone
    | TopLogprobs
    | PooledRow
    | SamplerOutput
    | LinkReport
    | SlowdownReport
    | HostMemoryReport
    | Padding
)


class LinkHello(LeanMessage, frozen=True, tag="hello"):
    """The first message on a connection between stages: its link and channel."""

    pipeline: Text
    epoch: Epoch
    from_stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    channel: Channel


class Frame(LeanMessage, frozen=True, tag="frame"):
    """A numbered message of a channel; ``frame_number`` counts from 0 per (epoch, channel)."""

    epoch: Epoch
    channel: Channel
    frame_number: Count
    body: RingMessage

    @property
    def payload(self) -> Payload | None:
        """The payload description of the body, if any."""
        return getattr(self.body, "payload", None)


class Ack(LeanMessage, frozen=True, tag="ack"):
    """Acknowledges all frames below ``next_frame`` of an (epoch, channel)."""

    epoch: Epoch
    channel: Channel
    next_frame: Count


class Heartbeat(LeanMessage, frozen=True, tag="heartbeat"):
    """Heartbeat on the decode channel: every 1 s, or every 100 ms while requests live.

    ``completed_seq`` is the compute thread's progress and ``queued`` counts volumes that wait for
    it; queued work without progress means death, even with healthy sockets. ``sent_at`` is the
    sender's monotonic clock in seconds; the answer returns it in ``echo``.
    """

    epoch: Epoch
    completed_seq: Seq
    queued: Count
    sent_at: float
    echo: float = 0.0
    #: Expected seconds of the running step, so that a long step doesn't count as death.
    predicted_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0


#: All messages between stages.
StageMessage = LinkHello | Frame | Ack | Heartbeat
