"""Messages on the pipe between a daemon and a worker (the worker's stdin and stdout).

Each is a 4-byte little-endian length and a msgpack body of at most 1 MiB by default. The worker
logs to stderr. A worker exits at EOF, so no orphan keeps a GPU's memory.
"""

import struct
from typing import Annotated, BinaryIO, TypeVar

import msgspec

from molink.errors import WireError
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import KVCacheDType, LayerRange, Quantize
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.facts.scalars import Count, Index, Sentence, Text
from molink.facts.settings import PipelineSettings
from molink.wire.messages.base import Message, Port, PublicKey
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import SchedulerLoad, StageLoad

#: Maximum bytes of a message; valid ones are far smaller.
MAX_PIPE_MESSAGE = 1 << 20
Seconds = Annotated[float, msgspec.Meta(ge=0)]
_LENGTH = struct.Struct("<I")


class WarmUp(Message, frozen=True, kw_only=True, tag="warm-up"):
    """First message to a standby worker: prepare for a similar :class:`LoadStage`.

    ``layers`` are in ``model_dir``; the rest is as in :class:`LoadStage`. The worker uses no GPU
    memory. Without a ``model_dir`` the model is unknown, and the worker imports only common
    modules.
    """

    layers: LayerRange = (0, 1)
    model_dir: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    dtype: DTypeChoice = "auto"
    device: Text = "cpu"
    threads: Index = 0
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheDType = "auto"


class WarmedUp(Message, frozen=True, kw_only=True, tag="warmed-up"):
    """A standby worker has imported and compiled what it can in advance."""


class DraftModelSpec(Message, frozen=True, kw_only=True):
    """A draft model to hold with the first stage, with ``kv_bytes`` for its pool."""

    model_dir: Annotated[str, msgspec.Meta(max_length=4096)]
    kv_bytes: Count


class LoadStage(Message, frozen=True, kw_only=True, tag="load-stage"):
    """Everything that a worker needs to load its stage; may follow a :class:`WarmUp`.

    ``secret_key`` is the peer's CURVE key, which never appears in argv or the environment.
    ``kv_bytes`` bounds the KV pool; ``ports`` is the half-open range of the data socket. ``device``
    is ``cpu`` or ``cuda:N``; ``threads`` 0 is torch's default.
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
    #: How the pipeline serves; shared with the daemon's settings.
    settings: PipelineSettings = PipelineSettings()
    #: Stages on this PC that share its memory, including this one.
    stages_per_host: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    #: Folder of measured profiles; empty: measure each time.
    profile_cache: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    #: Bytes of GPU memory that the worker may allocate; 0: unbounded.
    memory_limit: Count = 0
    #: Whether to skip optional work that takes seconds, since requests may be waiting.
    skip_optional: bool = False
    #: Names of kernels that compute wrong results on this PC (:mod:`molink.facts.kernels`).
    disabled_kernels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    #: Kernels without which the stage needs more memory than planned; it fails if one is disabled.
    required_kernels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    #: File with results of kernel checks; empty: no checks.
    kernel_checks_path: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    #: The scheduler's draft model, if the scheduler runs in this worker.
    draft: DraftModelSpec | None = None
    #: Routed experts of each layer that stay in host memory.
    host_experts: Index = 0


class PeerKey(Message, frozen=True, kw_only=True):
    """A peer that may connect to this worker."""

    peer: Text
    public_key: PublicKey


class PeerKeys(Message, frozen=True, kw_only=True, tag="peer-keys"):
    """All current peers; others are disconnected at once."""

    peers: tuple[PeerKey, ...]


class FormRing(Message, frozen=True, kw_only=True, tag="form-ring"):
    """Start epoch ``epoch`` with new KV, links and numbers.

    This worker is one of ``ring``. ``profiles`` has the profiles of all stages in ring order; empty
    if unknown.
    """

    epoch: Count
    ring: tuple[StageAddress, ...]
    blocks: Index
    micro_batches: Index
    profiles: Annotated[tuple[Profile, ...], msgspec.Meta(max_length=16)] = ()


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Answered immediately by :class:`Pong`, even during a step."""


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """The worker lives; ``is_stuck`` if the running step takes far longer than expected."""

    is_stuck: bool = False


class WeightLoadProgress(Message, frozen=True, kw_only=True, tag="weight-load-progress"):
    """``done`` of ``total`` bytes of the stage's files are loaded."""

    done: Count
    total: Count


class WorkerLoaded(Message, frozen=True, kw_only=True, tag="worker-loaded"):
    """Weights are loaded and the data socket is bound to ``port``.

    ``weights_s`` and ``profile_s`` are the seconds for loading and measuring.
    """

    port: Port
    max_blocks: Index
    profile: Profile = UNKNOWN_PROFILE
    weight_bytes: Count
    weights_s: Seconds = 0.0
    profile_s: Seconds = 0.0


class RingFormed(Message, frozen=True, kw_only=True, tag="ring-formed"):
    """This stage is ready in the ring of ``epoch``."""

    epoch: Count


class WorkerFailed(Message, frozen=True, kw_only=True, tag="worker-failed"):
    """The worker can't continue and exits. ``kind`` names the error's class.

    ``failed_kernels`` were required of it.
    """

    kind: Text
    message: Sentence
    failed_kernels: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()


class NextStageLost(Message, frozen=True, kw_only=True, tag="next-stage-lost"):
    """The next stage of the ring has timed out."""

    epoch: Count
    reason: Sentence


class PeerBlocked(Message, frozen=True, kw_only=True, tag="peer-blocked"):
    """This worker has blocked a peer for misbehaviour, until it is removed.

    ``is_previous_stage`` says whether the peer runs the previous stage of the ring of ``epoch`` (0
    before the first ring). Such a ring can't work, and this stage is not the cause of its silence.
    Reported again for each ring that includes the peer.
    """

    epoch: Count
    peer: Text
    reason: Sentence
    is_previous_stage: bool


class WorkerStats(Message, frozen=True, kw_only=True, tag="worker-stats"):
    """A worker's monotonic counters and gauges by name, for ``/metrics``.

    ``load`` and ``scheduler`` go into the peer's report.
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
        WireError: it exceeds ``limit`` bytes.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > limit:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is too long for the pipe")
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_pipe(
    stream: BinaryIO, decoder: "msgspec.msgpack.Decoder[T]", limit: int = MAX_PIPE_MESSAGE
) -> T | None:
    """Read one message; ``None`` at EOF.

    Raises:
        WireError: the bytes are invalid or exceed ``limit``.
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
