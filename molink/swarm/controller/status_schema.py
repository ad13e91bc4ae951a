"""What is read of ``molink status --json``, also for ``molink top`` and the chat page: a schema.

What is not told (an older daemon, a swarm without a model) has a default, and what is new to this
version is passed over.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Count

#: Of any figure, so that the arithmetic on it can't fail.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
LayerRange = tuple[Count, Count]


class ByteProgress(msgspec.Struct, frozen=True):
    """How far a transfer is, in bytes."""

    done: Count = 0
    total: Count = 0


class LoadProgress(ByteProgress, frozen=True):
    """How far loading into memory is; bytes/s, and the seconds that are left if that is known."""

    rate: Amount = 0.0
    eta_s: Amount | None = None


class TransferStatus(msgspec.Struct, frozen=True, rename={"source": "from"}):
    """Files that come to a PC, in bytes; bytes/s. ``copy``: nobody waits for them."""

    model: str = ""
    bytes: Count = 0
    total: Count = 0
    rate: Amount = 0.0
    eta_s: Amount | None = None
    source: str = ""
    copy: bool = False


class ChannelStatus(msgspec.Struct, frozen=True):
    """Bytes of one lane of a link."""

    queued: Count = 0
    in_flight: Count = 0


class LinkStatus(msgspec.Struct, frozen=True):
    """A stage's link to the next one: seconds one way, bytes/s (0 = unknown), and its lanes."""

    latency_s: Amount = 0.0
    rate: Amount = 0.0
    decode: ChannelStatus = ChannelStatus()
    bulk: ChannelStatus = ChannelStatus()


class StageUsage(msgspec.Struct, frozen=True):
    """How busy a stage is: shares in percent, sizes in bytes."""

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
    fetching: ByteProgress | None = None
    loading: LoadProgress | None = None
    load: StageUsage | None = None

    @property
    def activity(self) -> str:
        """What it does instead of serving, and how far that is; empty if nothing."""
        if self.state in ("", "ready"):
            return ""
        done = self.loading or self.fetching
        return (
            self.state if done is None else f"{self.state} {format_percent(done.done, done.total)}"
        )


class PeerStatus(msgspec.Struct, frozen=True):
    """A member of the swarm."""

    id: str
    name: str = ""
    state: str = ""
    address: str = ""
    endpoint: str = ""
    version: str = ""
    device: str = ""
    memory: Count = 0
    #: Layers that it offers to hold (``none``: only an endpoint), and why it doesn't for now.
    stage: str = ""
    paused: str = ""
    reason: str = ""
    #: How much of the models lies on its disk, in percent.
    copied: Count = 0
    #: Of a further device of a PC: the id of the PC's own peer.
    pc: str = ""
    transfers: tuple[TransferStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()


class StageStatus(msgspec.Struct, frozen=True):
    """A stage as the coordinator has placed it."""

    peer: str
    layers: LayerRange
    device: str = ""
    decode_s: Amount = 0.0
    #: Seconds until a row is at the next stage.
    link_s: Amount = 0.0


class RequestStatus(msgspec.Struct, frozen=True):
    """A request that a head serves; ``peer`` is the PC whose endpoint was asked."""

    peer: str
    state: str = ""
    prompt: Count = 0
    computed: Count = 0
    generated: Count = 0
    tokens_per_s: Amount = 0.0
    age_s: Amount = 0.0
    #: Of one in host memory: seconds until it should come back.
    resume_s: Amount = 0.0


class SchedulerStatus(msgspec.Struct, frozen=True):
    """What the head of a pipeline does."""

    running: Count = 0
    waiting: Count = 0
    blocks: Count = 0
    used: Count = 0
    micro_batches: Count = 0
    #: Requests whose KV is in host memory, and the blocks that this has room for and has.
    swapped: Count = 0
    host_blocks: Count = 0
    host_used: Count = 0
    #: How often there was no room for one, which is computed anew.
    swap_fallbacks: Count = 0
    #: Percent of the prompts' tokens that the prefix cache had.
    cached: Count = 0
    #: Requests in each queue of its scheduling policy, the best first; none if it has no queues.
    queues: tuple[Count, ...] = ()
    requests: tuple[RequestStatus, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all its requests that are told, together."""
        return sum(one.tokens_per_s for one in self.requests if one.state == "decode")


class PipelineStatus(msgspec.Struct, frozen=True):
    """A pipeline and its stages in ring order; none are known while it can't be formed."""

    id: str
    model: str = ""
    epoch: Count = 0
    ready: bool = False
    reason: str = ""
    stages: tuple[StageStatus, ...] = ()
    scheduler: SchedulerStatus | None = None


class PairingStatus(msgspec.Struct, frozen=True):
    """A PC that wants to join and shows ``code`` on its own screen."""

    name: str = ""
    code: str = ""
    address: str = ""


class BannedPeerStatus(msgspec.Struct, frozen=True):
    """A member that this PC has cut off."""

    peer: str = ""
    name: str = ""
    banned_by: str = ""
    reason: str = ""


class RevokedPeerStatus(msgspec.Struct, frozen=True):
    """A peer that was shut out."""

    id: str = ""
    name: str = ""


class CoordinatorStatus(msgspec.Struct, frozen=True):
    """Whether the coordinator could be asked, and where it listens (``192.168.1.7:5466``)."""

    state: str = ""
    addresses: tuple[str, ...] = ()


class ModelStatus(msgspec.Struct, frozen=True):
    """A model that is to be served; one that was ``stopped`` is not, for now."""

    name: str = ""
    quantize: str = "none"
    replicas: Count = 1
    ready: Count = 0
    stopped: bool = False


class SwarmStatus(msgspec.Struct, frozen=True):
    """The swarm ``swarm`` (an id), called ``name``, which the peer ``leader`` leads."""

    swarm: str = ""
    name: str = ""
    leader: str = ""
    coordinator: CoordinatorStatus = CoordinatorStatus()
    model: str | None = None
    quantize: str = "none"
    models: tuple[ModelStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    pipelines: tuple[PipelineStatus, ...] = ()
    files: str = ""
    trouble: str = ""
    story: tuple[str, ...] = ()
    clock: Amount | None = None
    banned_peers: tuple[BannedPeerStatus, ...] = ()
    pairing_requests: tuple[PairingStatus, ...] = ()
    revoked: tuple[RevokedPeerStatus, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether each model that is served has a pipeline that is ready, and there is one."""
        ready: dict[str, bool] = {}
        for one in self.pipelines:
            ready[one.model] = ready.get(one.model, False) or one.ready
        return bool(ready) and all(ready.values())


def duplicate_names(status: SwarmStatus) -> Iterator[str]:
    """What a person should know of PCs that are called alike."""
    counts = Counter(peer.name for peer in status.peers if not peer.pc)
    for name, count in counts.items():
        if count > 1:
            yield (
                f"{count} PCs are called {name}: commands take their ids; `--name` at the next "
                "start of one renames it"
            )


def format_percent(done: int, total: int) -> str:
    """How much of it is done, in words."""
    return f"{min(100, 100 * done // total)} %" if total > 0 else "0 %"


def short_device_name(text: str) -> str:
    """A device's name without what all of them begin with."""
    return text.replace("NVIDIA ", "").replace("GeForce ", "")


def decode_status(text: bytes) -> SwarmStatus:
    """The status that a daemon has told (JSON as UTF-8).

    Raises:
        WireError: it is none.
    """
    try:
        return msgspec.json.decode(text, type=SwarmStatus)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"the daemon tells what this version doesn't understand: {error}. "
            "Start it anew if molink was updated meanwhile."
        ) from None
