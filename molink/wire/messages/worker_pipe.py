"""Messages on the pipe between a daemon and one of its workers (stdin and stdout of the worker).

Each is a 4-byte little-endian length and a msgpack body of at most 1 MiB, unless both ends
name another bound. The worker's log goes to stderr. The pipe's end is the worker's end: a worker
that reads EOF exits at once, so that no orphan keeps a GPU's memory.
"""

import struct
from typing import Annotated, BinaryIO, TypeVar

import msgspec

from molink.errors import WireError
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import LayerRange, Quantize
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.facts.scalars import Count, Index, Sentence, Text
from molink.facts.settings import PipelineSettings
from molink.wire.messages.base import Message, Port, PublicKey
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import SchedulerLoad, StageLoad

#: Bytes: nothing that goes over the pipe comes near, so a longer one is garbage.
MAX_PIPE_MESSAGE = 1 << 20
Seconds = Annotated[float, msgspec.Meta(ge=0)]
_LENGTH = struct.Struct("<I")


class WarmUp(Message, frozen=True, kw_only=True, tag="warm"):
    """The first message to a spare: be ready for a :class:`LoadStage` that resembles this.

    ``layers`` are in ``model_dir``; the rest is as in :class:`LoadStage`. The spare takes no memory
    of a GPU, and gives way to all other processes until it has said :class:`WarmedUp`. Without a
    ``model_dir`` no model is known yet, and a stage will come soon: it imports what all need, and
    doesn't give way.
    """

    layers: LayerRange = (0, 1)
    model_dir: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    dtype: DTypeChoice = "auto"
    device: Text = "cpu"
    threads: Index = 0
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    quantize: Quantize = "none"


class WarmedUp(Message, frozen=True, kw_only=True, tag="warmed"):
    """A spare has imported and compiled what it can; a :class:`LoadStage` now takes it least
    time."""


class DraftModelSpec(Message, frozen=True, kw_only=True):
    """A small model to hold beside the first stage, whole, with ``kv_bytes`` for a pool."""

    model_dir: Annotated[str, msgspec.Meta(max_length=4096)]
    kv_bytes: Count


class LoadStage(Message, frozen=True, kw_only=True, tag="start"):
    """The first message, or the first after :class:`WarmUp`: all a worker needs to load its stage.

    ``secret_key`` is the peer's CURVE key (it never appears in argv or the environment).
    ``kv_bytes`` bounds the KV pool; ``ports`` is the range to bind the
    data socket in (half-open).
    ``device`` is ``cpu`` or ``cuda:N``; ``threads`` 0 leaves torch's default.
    """

    pipeline: Text
    stage: Index
    stages: Index
    layers: LayerRange
    model_dir: Annotated[str, msgspec.Meta(max_length=4096)]
    dtype: DTypeChoice
    device: Text
    threads: Index
    public_key: PublicKey
    secret_key: PublicKey
    bind: Text
    ports: tuple[Port, Port]
    kv_bytes: Count
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    max_model_len: Count
    #: How the pipeline serves; the same object that the daemon's settings hold.
    settings: PipelineSettings = PipelineSettings()
    #: Stages of this PC that share its memory, this one included.
    stages_per_host: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    #: Folder in which measured profiles are kept; empty: they are measured anew each time.
    profile_cache: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    quantize: Quantize = "none"
    #: Bytes of a GPU that the worker may allocate in all; 0 = no bound.
    memory_limit: Count = 0
    #: Whether requests may be waiting: what takes seconds and can be done later is left.
    skip_optional: bool = False
    #: Kernels that compute wrongly here, by :mod:`molink.facts.kernels`.
    disabled_kernels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    #: File in which is kept how kernels were found to compute; empty: none is tried beforehand.
    kernel_checks_path: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    #: What the head may ask for drafts, where it is here.
    draft: DraftModelSpec | None = None


class PeerKey(Message, frozen=True, kw_only=True):
    """A member that may speak to this worker."""

    peer: Text
    public_key: PublicKey


class PeerKeys(Message, frozen=True, kw_only=True, tag="members"):
    """All members now; whoever is missing is dropped at once."""

    peers: tuple[PeerKey, ...]


class FormRing(Message, frozen=True, kw_only=True, tag="form-ring"):
    """Begin (or begin again) under ``epoch``: fresh KV, links, seqs. ``ring[stage]`` is you.

    ``profiles`` are those of all stages in ring order, or nothing where none is known.
    """

    epoch: Count
    ring: tuple[StageAddress, ...]
    blocks: Index
    micro_batches: Index
    profiles: Annotated[tuple[Profile, ...], msgspec.Meta(max_length=16)] = ()


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """A worker answers with :class:`Pong`, at once and whatever else it does."""


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """The worker lives; ``is_stuck`` if the step that it computes takes far longer than it
    should."""

    is_stuck: bool = False


class WeightLoadProgress(Message, frozen=True, kw_only=True, tag="loading"):
    """How far loading is: ``done`` of ``total`` bytes of the stage's files."""

    done: Count
    total: Count


class WorkerLoaded(Message, frozen=True, kw_only=True, tag="loaded"):
    """Weights are loaded and the data socket is bound to ``port``.

    ``weights_s`` and ``profile_s`` are the seconds that loading and measuring took.
    """

    port: Port
    max_blocks: Index
    profile: Profile = UNKNOWN_PROFILE
    weight_bytes: Count
    weights_s: Seconds = 0.0
    profile_s: Seconds = 0.0


class RingFormed(Message, frozen=True, kw_only=True, tag="formed"):
    """The ring of ``epoch`` can be used, as far as this stage is concerned."""

    epoch: Count


class WorkerFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """The worker can't go on; it exits after this. ``kind`` names the error's class."""

    kind: Text
    message: Sentence


class NextStageLost(Message, frozen=True, kw_only=True, tag="next-lost"):
    """The next stage of the ring has made no progress for longer than it may."""

    epoch: Count
    reason: Sentence


class PeerBlocked(Message, frozen=True, kw_only=True, tag="blocked"):
    """A member has been cut off by this worker for misbehaving; it stays so until it is removed.

    ``is_previous_stage`` is whether it runs the previous stage of the ring of ``epoch`` (0 before
    the first one). If so, no such ring can work, and not this stage is to blame for its silence. It
    is reported again with each ring that is formed with it.
    """

    epoch: Count
    peer: Text
    reason: Sentence
    is_previous_stage: bool


class WorkerStats(Message, frozen=True, kw_only=True, tag="stats"):
    """What ``/metrics`` shows of a worker: monotonic counters and gauges by name.

    ``load`` and ``scheduler`` are what others are told of it.
    """

    epoch: Count
    counters: dict[Text, float]
    gauges: dict[Text, float]
    load: StageLoad | None = None
    scheduler: SchedulerLoad | None = None


ToWorker = WarmUp | LoadStage | PeerKeys | FormRing | Ping
FromWorker = (
    WarmedUp
    | WeightLoadProgress
    | WorkerLoaded
    | RingFormed
    | Pong
    | WorkerFailed
    | NextStageLost
    | PeerBlocked
    | WorkerStats
)

T = TypeVar("T")


def write_pipe(stream: BinaryIO, message: Message, limit: int = MAX_PIPE_MESSAGE) -> None:
    """Write one message and flush it.

    Raises:
        WireError: it is longer than ``limit`` bytes.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > limit:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too long for the pipe")
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_pipe(
    stream: BinaryIO, decoder: "msgspec.msgpack.Decoder[T]", limit: int = MAX_PIPE_MESSAGE
) -> T | None:
    """Read one message; ``None`` at the end of the pipe.

    Raises:
        WireError: the bytes are no message of the decoder's type, or over ``limit``.
    """
    prefix = stream.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(prefix)
    if length > limit:
        raise WireError(f"a pipe message of {length} bytes is over {limit}")
    body = stream.read(length)
    if len(body) < length:
        return None
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a pipe message: {error}") from error
