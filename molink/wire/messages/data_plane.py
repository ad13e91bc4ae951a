"""Messages of the data plane between the stages of a pipeline.

Words as in the design: a *seq* is the order stamp that stage 0 gives to every volume, admission
and release; an *epoch* is the generation of the pipeline; a *channel* is one of a hop's two
connections. Positions count tokens of a request from 0, prompt included.
"""

from enum import IntEnum
from typing import Annotated

import msgspec

from molink.facts.drafts import MAX_DRAFTS
from molink.facts.profile import MAX_SLOWDOWN
from molink.facts.scalars import Count, Index, Text
from molink.wire.messages.base import LeanMessage, Payload


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


#: Rows groups of one volume, bounded so that its header stays under 4 KB.
MAX_SLICES = 128
#: Volumes of one kind (prefill or decode) that a head may have in flight.
MAX_MICRO_BATCHES = 64
#: Entries of a logit bias, bounded for the same reason.
MAX_LOGIT_BIAS = 256
#: What a repetition penalty may be: float32 divides logits by it.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
#: Above this a temperature draws among all tokens alike.
MAX_TEMPERATURE = 100.0
#: Alternatives to a token, as many as OpenAI's API allows.
MAX_TOP_LOGPROBS = 20
#: Blocks of one order to swap: their ids, there and here, go in one message.
MAX_SWAP_BLOCKS = 30_000
#: Bytes of a grammar's text: it goes in one message.
MAX_GRAMMAR_BYTES = 128 * 1024

Epoch = Count
Seq = Count
RequestId = Index
RepetitionPenalty = Annotated[
    float, msgspec.Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
]
#: What is added to a token's logit; as OpenAI's API has it.
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class Channel(IntEnum):
    """The two connections of a hop: decode rows and control, or prefill rows in bulk."""

    DECODE = 0
    BULK = 1


class SamplingParams(LeanMessage, frozen=True, tag=False):
    """How the tail picks a token; the ordinary parameters of OpenAI's and vLLM's API.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``min_p`` 0 are off. ``seed`` is always set (the
    daemon draws one when the client gave none), so a resubmitted request goes on unchanged.
    ``logprobs`` is -1 for none, else how many alternatives to report beside the sampled token.
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

    @property
    def needs_history(self) -> bool:
        """Whether the tail has to know the tokens so far (penalties are recomputed from them)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


# --- between stages: every one of these travels inside a numbered Frame ----------------------


class Admit(LeanMessage, frozen=True, tag="admit"):
    """A request begins; sent once, so that decode frames can be lean."""

    seq: Seq
    request: RequestId
    sampling_params: SamplingParams
    #: Tokens that were given, not sampled by this request: its prompt as the client sent it.
    prompt_tokens: Count
    #: How many tokens' keys it may come to have: LongRoPE rotates all of them by that.
    max_positions: Count = 0


class History(LeanMessage, frozen=True, tag="history"):
    """Tokens of a request from position ``first`` (payload ``i32 [n]``), for penalties.

    Sent after :class:`Admit`, only if ``sampling.needs_history``; positions at or beyond
    ``Admit.prompt_tokens`` count as generated (a resubmitted request has some).
    """

    seq: Seq
    request: RequestId
    first: Count
    payload: Payload


class Grammar(LeanMessage, frozen=True, tag="grammar"):
    """The grammar that a request's answer is held to (payload ``u8 [n]``), for the tail.

    Sent after :class:`Admit`, before any rows, and before :class:`History`, which a request that
    has one gets too if some of its answer is known: the tail goes through that part again.
    """

    seq: Seq
    request: RequestId
    payload: Payload


class BlockTable(LeanMessage, frozen=True, tag="table"):
    """KV blocks that a request's block table begins with (payload ``i32 [n]``), in order.

    Sent after :class:`Admit`, and before any rows, if the prefix cache has the request's first
    tokens: its rows begin after them.
    """

    seq: Seq
    request: RequestId
    payload: Payload


class RequestSlice(LeanMessage, frozen=True, tag=False):
    """Consecutive rows of one request in a volume: tokens at ``start … start + count - 1``.

    The last of them may be ``drafts``: tokens that nobody has sampled. The tail samples from the
    row before them and from each of theirs, as long as what it samples is the draft that follows.
    Where all of them are, the rows go *ahead*: the token before them was still to be sampled when
    they were issued. The tail samples from them only if they go on from what it has sampled.
    """

    request: RequestId
    start: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    #: The latest earlier seq that writes or releases a block these rows use.
    after_seq: Seq
    #: Ids of KV blocks appended to the request's block table before these rows run.
    blocks: tuple[Index, ...] = ()
    #: Whether the tail samples a token from the last of these rows.
    sample: bool = False
    #: Before these rows run, the positions before ``start`` in its block are copied from this one
    #: (the prefix cache has them there, followed by others); -1 if nothing is to be copied.
    copy_from_block: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    #: Tokens of the last rows, or of all; only of decode rows that are sampled from.
    drafts: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_DRAFTS)] = ()

    @property
    def is_lookahead(self) -> bool:
        """Whether nobody knew the token of its first row when it was issued."""
        return len(self.drafts) == self.count

    @property
    def verified_drafts(self) -> tuple[int, ...]:
        """The drafts that are compared with what is sampled from its own rows."""
        return self.drafts[1:] if self.is_lookahead else self.drafts

    def continues_from(self, position: int, token: int) -> bool:
        """Whether they may be sampled from if ``token`` at ``position`` is the last one known."""
        return not self.is_lookahead or (self.start, self.drafts[0]) == (position, token)


class Volume(LeanMessage, frozen=True, tag="volume"):
    """Activations of one micro-batch's decode rows, or of one prefill chunk.

    The payload is ``[n, hidden]`` rows, the first ``n`` of ``sum(count)``; the others follow in
    :class:`VolumeFragment` messages of the same channel. Toward a stage's own executor it has none.
    """

    seq: Seq
    prefill: bool
    slices: Annotated[tuple[RequestSlice, ...], msgspec.Meta(min_length=1, max_length=MAX_SLICES)]
    payload: Payload

    @property
    def count(self) -> int:
        """Rows of all groups together."""
        rows = self.slices
        return rows[0].count if len(rows) == 1 else sum(group.count for group in rows)

    @property
    def context(self) -> float:
        """How many tokens come before its row groups, on average of its rows."""
        rows = self.slices
        if len(rows) == 1:
            return rows[0].start
        return sum(group.start * group.count for group in rows) / self.count


class VolumeFragment(LeanMessage, frozen=True, tag="part"):
    """More rows of the volume ``seq``, beginning with row ``first``."""

    seq: Seq
    first: Index
    payload: Payload


class Release(LeanMessage, frozen=True, tag="release"):
    """A request is over (finished, cancelled or preempted): forget it after seq ``after_seq``.

    Rows of it that arrive later are dropped. When this message has gone round the ring, every
    stage has completed it and the head may reuse the request's blocks.

    ``pending_seqs`` lists the other seqs with rows of the request that had not come back when it
    was released. They are named one by one because the last may be dropped, and so complete, at a
    stage where an earlier one is still on its way.
    """

    seq: Seq
    request: RequestId
    after_seq: Seq
    pending_seqs: Annotated[tuple[Seq, ...], msgspec.Meta(max_length=MAX_MICRO_BATCHES)] = ()


class SwapOut(LeanMessage, frozen=True, tag="swap_out"):
    """Blocks of a request are copied to memory of the host, before its :class:`Release`.

    The payload is ``i32 [2, n]``: ``n`` blocks of its table, then the host blocks that they go to.
    None of its rows is on its way.
    """

    seq: Seq
    request: RequestId
    payload: Payload


class SwapIn(LeanMessage, frozen=True, tag="swap_in"):
    """Blocks of a request's table are filled from memory of the host.

    Sent after :class:`BlockTable`, and before any rows, which begin after them. The payload is as
    that of the :class:`SwapOut` with the seq ``swap_out_seq``, which has filled the host blocks.
    """

    seq: Seq
    request: RequestId
    swap_out_seq: Seq
    payload: Payload


class Tombstone(LeanMessage, frozen=True, tag="tombstone"):
    """A volume all of whose rows were dropped: its seq counts as completed."""

    seq: Seq


class TopLogprobs(LeanMessage, frozen=True, tag="top"):
    """Alternatives at a position; precedes the :class:`SamplerOutput` that has the token."""

    request: RequestId
    position: Count
    tokens: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)]
    logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOP_LOGPROBS)]


class SampledId(LeanMessage, frozen=True, tag=False):
    """One sampled token. ``position`` is the token's own; ``logprob`` is NaN if not asked for."""

    request: RequestId
    position: Count
    token: Index
    logprob: float = float("nan")


class ForcedTokens(LeanMessage, frozen=True, tag=False):
    """Tokens that have to follow the last ``SampledId`` of a request: its grammar allows no
    others."""

    request: RequestId
    tokens: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=MAX_DRAFTS)]


class SamplerOutput(LeanMessage, frozen=True, tag="sampled"):
    """The tail completed seq ``seq``; ``sampled`` has a token per row group that samples.

    Of a group with drafts it has those that were accepted, in order, and the token after them; of
    one that went ahead and is wrong, nothing.

    A row group whose logits were unusable (NaN) is listed in ``failed`` instead. ``forced`` is
    advice: which drafts are sure to be right.
    """

    seq: Seq
    sampled: Annotated[tuple[SampledId, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()
    failed: Annotated[tuple[RequestId, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()
    forced: Annotated[tuple[ForcedTokens, ...], msgspec.Meta(max_length=MAX_SLICES)] = ()


class Padding(LeanMessage, frozen=True, tag="probe"):
    """Bytes (payload ``u8 [n]``) that mean nothing: how fast they arrive tells the link's rate."""

    payload: Payload


RingMessage = (
    Admit
    | History
    | Grammar
    | BlockTable
    | Volume
    | VolumeFragment
    | Release
    | SwapOut
    | SwapIn
    | Tombstone
    | TopLogprobs
    | SamplerOutput
    | LinkReport
    | SlowdownReport
    | HostMemoryReport
    | Padding
)


class LinkHello(LeanMessage, frozen=True, tag="hello"):
    """First message on a connection of a hop: which link and channel this is."""

    pipeline: Text
    epoch: Epoch
    from_stage: Annotated[int, msgspec.Meta(ge=0, le=255)]
    channel: Channel


class Frame(LeanMessage, frozen=True, tag="frame"):
    """A numbered message of a channel: ``frame_number`` rises by one from 0 in each (epoch,
    channel)."""

    epoch: Epoch
    channel: Channel
    frame_number: Count
    body: RingMessage

    @property
    def payload(self) -> Payload | None:
        """The body's payload header, if it has one."""
        return getattr(self.body, "payload", None)


class Ack(LeanMessage, frozen=True, tag="ack"):
    """All frames below ``next_frame`` of that (epoch, channel) have arrived."""

    epoch: Epoch
    channel: Channel
    next_frame: Count


class Heartbeat(LeanMessage, frozen=True, tag="heartbeat"):
    """Application heartbeat on the decode channel: 1 s, and every 100 ms while requests live.

    ``completed_seq`` is the compute thread's last completed seq and ``queued`` how many volumes
    wait for it: no progress with work queued is death, whatever the sockets say. ``sent_at`` is the
    sender's monotonic clock in seconds; an answer returns it in ``echo``.
    """

    epoch: Epoch
    completed_seq: Seq
    queued: Count
    sent_at: float
    echo: float = 0.0
    #: How long the step that runs should take, in seconds: nobody is dead for working.
    predicted_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0


#: What stages say to each other.
StageMessage = LinkHello | Frame | Ack | Heartbeat
