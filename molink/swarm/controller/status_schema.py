"""Schema of ``molink status --json``, which the coordinator builds and every client decodes.

Missing fields (an older daemon, a swarm without a model) have defaults; unknown ones are ignored.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from molink.errors import WireError
from molink.facts.device import Device
from molink.facts.scalars import Count

#: Bound of any figure, so that arithmetic on it cannot fail.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
LayerRange = tuple[Count, Count]


class ByteProgress(msgspec.Struct, frozen=True):
    """Progress of a transfer, in bytes."""

    done: Count = 0
    total: Count = 0


class LoadProgress(ByteProgress, frozen=True):
    """Progress of loading into memory: bytes/s, and the remaining seconds if known."""

    rate: Amount = 0.0
    eta_s: Amount | None = None


class TransferStatus(msgspec.Struct, frozen=True, rename={"source": "from"}):
    """Files being fetched, in bytes and bytes/s; ``copy`` is a replica that nothing waits for."""

    model: str = ""
    bytes: Count = 0
    total: Count = 0
    rate: Amount = 0.0
    eta_s: Amount | None = None
    source: str = ""
    copy: bool = False


class ChannelStatus(msgspec.Struct, frozen=True):
    """Bytes of one channel of a link."""

    queued: Count = 0
    in_flight: Count = 0


class LinkStatus(msgspec.Struct, frozen=True):
    """A stage's link to the next one: one-way seconds, bytes/s (0 = unknown), and its channels."""

    latency_s: Amount = 0.0
    rate: Amount = 0.0
    decode: ChannelStatus = ChannelStatus()
    bulk: ChannelStatus = ChannelStatus()


class StageUsage(msgspec.Struct, frozen=True):
    """Load of a stage: shares in percent, sizes in bytes; ``kv`` is the reserved size."""

    busy: Count = 0
    bubbles: Count = 0
    requests: Count = 0
    weights: Count = 0
    kv: Count = 0
    link: LinkStatus = LinkStatus()


class WorkerStatus(msgspec.Struct, frozen=True):
    """A stage as its own PC reports it."""

    layers: LayerRange
    pipeline: str = ""
    stage: Count = 0
    state: str = ""
    pid: int = 0
    fetching: ByteProgress | None = None
    loading: LoadProgress | None = None
    load: StageUsage | None = None

    @property
    def activity(self) -> str:
        """The stage's activity other than serving, with progress; empty if none."""
        if self.state in ("", "ready"):
            return ""
        done = self.loading or self.fetching
        return (
            self.state if done is None else f"{self.state} {format_percent(done.done, done.total)}"
        )


class PeerStatus(msgspec.Struct, frozen=True):
    """A member of the swarm. ``state``: ``online``, ``offline``, ``banned`` or ``refused``."""

    id: str
    name: str = ""
    state: str = ""
    address: str = ""
    endpoint: str = ""
    version: str = ""
    device: str = ""
    memory: Count = 0
    #: Properties of its device that placement uses.
    capacity: Device | None = None
    daemon_pid: int = 0
    #: Layers that it offers to hold (``none``: only an endpoint), and why it holds none for now.
    stage: str = ""
    paused: str = ""
    reason: str = ""
    #: Percentage of the models' files on its disk, and the layers of each partial model.
    copied: Count = 0
    held: dict[str, tuple[LayerRange, ...]] = {}
    #: For a further device of a PC: the id of its primary peer.
    pc: str = ""
    transfers: tuple[TransferStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()


class StageStatus(msgspec.Struct, frozen=True):
    """A stage as the coordinator has placed it."""

    peer: str
    layers: LayerRange
    device: str = ""
    decode_s: Amount = 0.0
    #: Seconds until a row reaches the next stage, and whether that link was measured.
    link_s: Amount = 0.0
    link_measured: bool = False


class RequestStatus(msgspec.Struct, frozen=True):
    """A request of a scheduler; ``peer`` is the PC whose endpoint received it."""

    peer: str
    state: str = ""
    prompt: Count = 0
    computed: Count = 0
    generated: Count = 0
    tokens_per_s: Amount = 0.0
    age_s: Amount = 0.0
    #: For a swapped-out request: estimated seconds until it resumes.
    resume_s: Amount = 0.0


class SchedulerStatus(msgspec.Struct, frozen=True):
    """State of a pipeline's scheduler."""

    running: Count = 0
    waiting: Count = 0
    blocks: Count = 0
    used: Count = 0
    micro_batches: Count = 0
    #: Requests swapped out to host memory, and the host memory's size and use in blocks.
    swapped: Count = 0
    host_blocks: Count = 0
    host_used: Count = 0
    #: How often host memory was full and a request was recomputed instead.
    swap_fallbacks: Count = 0
    #: Prefix-cache hit rate of prompt tokens, in percent.
    cached: Count = 0
    #: Requests in each queue of the policy, highest priority first; empty if it has no queues.
    queues: tuple[Count, ...] = ()
    requests: tuple[RequestStatus, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Sum over the reported requests."""
        return sum(one.tokens_per_s for one in self.requests if one.state == "decode")


class PipelineStatus(msgspec.Struct, frozen=True):
    """A pipeline and its stages in ring order; no stages while it cannot be formed."""

    id: str
    model: str = ""
    replica: Count = 0
    epoch: Count = 0
    ready: bool = False
    state: str = ""
    reason: str = ""
    micro_batches: Count = 0
    blocks: Count = 0
    stages: tuple[StageStatus, ...] = ()
    scheduler: SchedulerStatus | None = None
    #: Why the last change began, and the seconds until each of its phases ended.
    phases: dict[str, str | float] = {}


class PairingStatus(msgspec.Struct, frozen=True):
    """A PC that asks to join and shows ``code`` on its own screen since ``since`` (Unix time)."""

    name: str = ""
    code: str = ""
    address: str = ""
    since: float = 0.0


class BannedPeerStatus(msgspec.Struct, frozen=True):
    """A member that this PC has banned."""

    peer: str = ""
    name: str = ""
    banned_by: str = ""
    reason: str = ""


class RevokedPeerStatus(msgspec.Struct, frozen=True):
    """A revoked peer."""

    id: str = ""
    name: str = ""


class CoordinatorStatus(msgspec.Struct, frozen=True):
    """Whether the coordinator answered, and its address (``192.168.1.7:5466``)."""

    state: str = ""
    addresses: tuple[str, ...] = ()
    pid: int = 0
    version: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """A desired model; a ``stopped`` one is not served for now."""

    name: str = ""
    quantize: str = "none"
    dtype: str = "auto"
    objective: str = "latency"
    min_stages: Count = 0
    replicas: Count = 1
    ready: Count = 0
    applied: bool = False
    stopped: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class RingEstimate:
    """A ring as predicted by placement, with one more PC like ``device`` (empty: the current ring).

    ``round_trip_s`` is the time per token of a micro-batch without waiting. ``tokens_per_s`` is the
    total over all streams: a single one for ``latency``, as many as the ring supports for
    ``throughput``.
    """

    device: str
    stages: int
    round_trip_s: float
    tokens_per_s: float


class ScaleOutStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pipeline's ring ``now``, its rings with one ``more`` PC of each kind, and its TTFT.

    ``first_token_s`` is the predicted time to the first token of a prompt of ``prompt`` tokens.
    """

    now: RingEstimate | None = None
    more: tuple[RingEstimate, ...] = ()
    prompt: int = 0
    first_token_s: float = 0.0


class SwarmStatus(msgspec.Struct, frozen=True):
    """Status of the swarm ``swarm`` (an id), called ``name`` and led by the peer ``leader``."""

    swarm: str = ""
    name: str = ""
    leader: str = ""
    term: int = 0
    coordinator: CoordinatorStatus = CoordinatorStatus()
    model: str | None = None
    quantize: str = "none"
    objective: str = "latency"
    models: tuple[ModelStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    pipelines: tuple[PipelineStatus, ...] = ()
    files: str = ""
    trouble: str = ""
    #: Pairs of peers; the first of each cannot connect to the second.
    unreachable: tuple[tuple[str, str], ...] = ()
    #: The coordinator's last transitions, and events for people; each begins with its time.
    story: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    clock: Amount | None = None
    time: Amount | None = None
    banned_peers: tuple[BannedPeerStatus, ...] = ()
    pairing_port: int | None = None
    pairing_requests: tuple[PairingStatus, ...] = ()
    revoked: tuple[RevokedPeerStatus, ...] = ()
    #: This PC's router: its ``kind``, the address whose ports it ``forwards``, and why it
    #: ``refuses``.
    router: dict[str, str] = {}
    #: Relays (``from``, ``to``, ``through``, ``punched``), and the control socket's counters.
    relays: tuple[dict[str, Any], ...] = ()
    counters: dict[str, int] = {}
    #: Estimates by pipeline; omitted unless requested.
    scale_out: dict[str, ScaleOutStatus] | msgspec.UnsetType = msgspec.UNSET
    #: Whether loads or peers were dropped to bound the size.
    truncated: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a pipeline, and each model to serve has a ready one."""
        ready: dict[str, bool] = {}
        for one in self.pipelines:
            ready[one.model] = ready.get(one.model, False) or one.ready
        return bool(ready) and all(ready.values())

    def kv_usage(self, pipeline: PipelineStatus) -> tuple[int, int]:
        """Return the bytes of KV in use, and reserved, on all stages of a pipeline."""
        loads = (
            worker.load
            for peer in self.peers
            for worker in peer.workers
            if worker.pipeline == pipeline.id and worker.load is not None
        )
        reserved = sum(load.kv for load in loads)
        scheduler = pipeline.scheduler or SchedulerStatus()
        # A block has the same id at all stages.
        return reserved * scheduler.used // max(1, scheduler.blocks), reserved


def split_event(line: str, clock: float | None) -> tuple[float | None, str]:
    """Split an event of the coordinator into its age in seconds (``None`` if unknown) and text."""
    when, _, text = line.partition(" ")
    try:
        return (None if clock is None else max(0.0, clock - float(when))), text
    except ValueError:
        return None, line


def format_percent(done: int, total: int) -> str:
    """Format progress as a percentage."""
    return f"{min(100, 100 * done // total)} %" if total > 0 else "0 %"


def short_device_name(text: str) -> str:
    """Return a device's name without common prefixes."""
    return text.replace("NVIDIA ", "").replace("GeForce ", "")


def decode_status(text: bytes) -> SwarmStatus:
    """Decode a daemon's status (JSON as UTF-8).

    Raises:
        WireError: it is malformed.
    """
    try:
        return msgspec.json.decode(text, type=SwarmStatus)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"can't read the daemon's status: {error}. "
            "Restart the daemon if molink was updated meanwhile."
        ) from None
