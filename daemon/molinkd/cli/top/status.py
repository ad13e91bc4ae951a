"""What ``molink top`` reads of ``molink status --json``: an explicit schema.

What is not told (an older daemon, a swarm without a model) has a default, and what is new to this
version is passed over.
"""

from typing import Annotated

import msgspec

from molink.errors import WireError
from molink.facts.scalars import Count

#: Of any figure, so that the arithmetic on it can't fail.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
LayerRange = tuple[Count, Count]


class Bytes(msgspec.Struct, frozen=True):
    """How far a transfer is, in bytes."""

    done: Count = 0
    total: Count = 0


class Transfer(msgspec.Struct, frozen=True, rename={"source": "from"}):
    """Files that come to a PC, in bytes; bytes/s. ``copy``: nobody waits for them."""

    bytes: Count = 0
    total: Count = 0
    rate: Amount = 0.0
    eta_s: Amount | None = None
    source: str = ""
    copy: bool = False


class LaneStatus(msgspec.Struct, frozen=True):
    """Bytes of one lane of a link."""

    queued: Count = 0
    in_flight: Count = 0


class Link(msgspec.Struct, frozen=True):
    """A stage's link to the next one: seconds one way, bytes/s (0 = unknown), and its lanes."""

    latency_s: Amount = 0.0
    rate: Amount = 0.0
    decode: LaneStatus = LaneStatus()
    bulk: LaneStatus = LaneStatus()


class StageUse(msgspec.Struct, frozen=True):
    """How busy a stage is: shares in percent, sizes in bytes."""

    busy: Count = 0
    bubbles: Count = 0
    requests: Count = 0
    weights: Count = 0
    kv: Count = 0
    link: Link = Link()


class Worker(msgspec.Struct, frozen=True):
    """A stage as its own PC reports it."""

    layers: LayerRange
    pipeline: str = ""
    stage: Count = 0
    state: str = ""
    fetching: Bytes | None = None
    load: StageUse | None = None


class Peer(msgspec.Struct, frozen=True):
    """A member of the swarm."""

    id: str
    name: str = ""
    state: str = ""
    device: str = ""
    memory: Count = 0
    reason: str = ""
    #: Of a further device of a PC: the id of the PC's own peer.
    pc: str = ""
    transfers: tuple[Transfer, ...] = ()
    workers: tuple[Worker, ...] = ()


class PlacedStage(msgspec.Struct, frozen=True):
    """A stage as the coordinator has placed it."""

    peer: str
    layers: LayerRange
    device: str = ""
    decode_s: Amount = 0.0


class Request(msgspec.Struct, frozen=True):
    """A request that a head serves; ``peer`` is the PC whose endpoint was asked."""

    peer: str
    state: str = ""
    prompt: Count = 0
    computed: Count = 0
    generated: Count = 0
    tokens_per_s: Amount = 0.0
    age_s: Amount = 0.0


class HeadStatus(msgspec.Struct, frozen=True):
    """What the head of a pipeline does."""

    running: Count = 0
    waiting: Count = 0
    blocks: Count = 0
    used: Count = 0
    micro_batches: Count = 0
    requests: tuple[Request, ...] = ()


class PipelineStatus(msgspec.Struct, frozen=True):
    """A pipeline and its stages in ring order; none are known while it can't be formed."""

    id: str
    model: str = ""
    epoch: Count = 0
    ready: bool = False
    reason: str = ""
    stages: tuple[PlacedStage, ...] = ()
    head: HeadStatus | None = None


class KnockStatus(msgspec.Struct, frozen=True):
    """A PC that wants to join and shows ``code`` on its own screen."""

    name: str = ""
    code: str = ""
    address: str = ""


class CutOff(msgspec.Struct, frozen=True):
    """A member that this PC has cut off."""

    name: str = ""
    by: str = ""
    reason: str = ""


class CoordinatorStatus(msgspec.Struct, frozen=True):
    """Whether the coordinator could be asked."""

    state: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """A model that is to be served; one that was ``stopped`` is not, for now."""

    name: str = ""
    stopped: bool = False


class Status(msgspec.Struct, frozen=True):
    """The swarm."""

    swarm: str = ""
    coordinator: CoordinatorStatus = CoordinatorStatus()
    model: str | None = None
    models: tuple[ModelStatus, ...] = ()
    peers: tuple[Peer, ...] = ()
    pipelines: tuple[PipelineStatus, ...] = ()
    files: str = ""
    trouble: str = ""
    story: tuple[str, ...] = ()
    clock: Amount | None = None
    cut_off: tuple[CutOff, ...] = ()
    knocks: tuple[KnockStatus, ...] = ()


def read_status(text: bytes) -> Status:
    """The status that a daemon has told (JSON as UTF-8).

    Raises:
        WireError: it is none.
    """
    try:
        return msgspec.json.decode(text, type=Status)
    except msgspec.MsgspecError as error:
        raise WireError(
            f"the daemon tells what this version doesn't understand: {error}. "
            "Start it anew if molink was updated meanwhile."
        ) from None
