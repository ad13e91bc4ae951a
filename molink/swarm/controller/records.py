"""What the coordinator knows for good: the rows of its state, as values."""

from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import BLOCK_SIZE, LayerRange, ModelFacts, Objective, Quantize
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.wire.messages.instructions import PeerInfo

#: How many PCs may be members at once, unless the owner sets another number.
MAX_PEERS = 64

#: A member that ``left`` may come back with an invitation, one that was ``revoked`` may not.
Standing = Literal["member", "left", "revoked"]


@dataclass(frozen=True, slots=True)
class SwarmRecord:
    """The swarm itself. ``port`` is where the coordinator listened last (0 = nowhere yet).

    ``max_peers``: how many PCs may be members at once.
    """

    id: str
    name: str
    public_key: str
    port: int = 0
    max_peers: int = MAX_PEERS


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A peer that has joined. An ``is_owner`` came in over the coordinator's own command line.

    ``announced`` is what the others were last told of it. ``invitation`` is the id of the one that
    it joined by last; empty if it is one of the first.
    """

    peer: str
    public_key: str
    name: str
    is_owner: bool = False
    standing: Standing = "member"
    announced: PeerInfo | None = None
    invitation: str = ""


@dataclass(frozen=True, slots=True)
class InvitationUse:
    """A peer joined by an invitation, at that unix time."""

    peer: str
    used_at: float


@dataclass(frozen=True, slots=True)
class InvitationRecord:
    """An invitation: the public half of its key, and until when it holds (0 = for ever).

    ``creator`` is the member that asked for it; it ends with its membership. ``max_uses`` is how
    many peers may join by it, ``used_by`` who has, in that order. Times are unix time.
    """

    id: str
    public_key: str
    expires_at: int
    creator: str
    created_at: float = 0.0
    max_uses: int = 1
    used_by: tuple[InvitationUse, ...] = ()

    @property
    def uses_left(self) -> int:
        """How many more peers may join by it."""
        return self.max_uses - len(self.used_by)


#: A peer that a model is bound to, and its stage there: ``auto`` or ``A:B``.
Pin = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """A model to be served; ``source`` is the peer that asked for it and holds its files.

    ``min_stages`` 0 is as many as ``min_peers``. ``replicas`` is how many pipelines it has, where
    there are enough peers. Where there are ``pins``, it runs on those peers only, and they run no
    other. ``applied``: it is written in a file (``molink apply``), which alone changes it.
    ``stopped``: it has none of its pipelines until it is wanted again, and then all of this.
    """

    facts: ModelFacts
    source: str
    min_peers: int = 1
    dtype: DTypeChoice = "auto"
    micro_batches: int = 0
    quantize: Quantize = "none"
    objective: Objective = "latency"
    min_stages: int = 0
    replicas: int = 1
    pins: tuple[Pin, ...] = ()
    applied: bool = False
    stopped: bool = False

    @property
    def num_pipelines(self) -> int:
        """How many pipelines it is to have now."""
        return 0 if self.stopped else self.replicas

    @property
    def target_stages(self) -> int:
        """How many stages its ring has at least, if there are so many peers."""
        return self.min_stages or self.min_peers

    @property
    def weight_key(self) -> tuple[object, ...]:
        """What makes every stage load anew if it changes."""
        return structs.replace(self.facts, hub=""), self.dtype, self.quantize

    @property
    def quantization(self) -> Quantize:
        """How projections are kept: as asked for, or as the files have them."""
        return self.facts.quantized if self.facts.quantized != "none" else self.quantize


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage of an epoch. ``port``, ``max_blocks`` and ``profile`` are known once it loaded."""

    peer: str
    layers: LayerRange
    port: int = 0
    max_blocks: int = 0
    profile: Profile = UNKNOWN_PROFILE


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """A pipeline in its newest epoch. ``formed``: all stages loaded, and ``FormPipeline`` may be
    out."""

    id: str
    model: str
    epoch: int
    stages: tuple[StageRecord, ...]
    formed: bool = False
    blocks: int = 0
    micro_batches: int = 0
    #: Positions of a KV block, at every stage.
    block_size: int = BLOCK_SIZE
    #: Which of the model's deployments it is of.
    replica: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values it has room for."""
        return self.blocks * self.block_size
