"""The coordinator's persistent state as value objects."""

from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from molink.facts.dtypes import DTypeChoice
from molink.facts.footprint import StageSetup
from molink.facts.model import BLOCK_SIZE, KVCacheDType, LayerRange, ModelFacts, Objective, Quantize
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.wire.messages.instructions import PeerInfo

#: Default maximum of simultaneous members.
MAX_PEERS = 64

#: A peer that ``left`` may rejoin with an invitation; a ``revoked`` one may not.
Standing = Literal["member", "left", "revoked"]


@dataclass(frozen=True, slots=True)
class SwarmRecord:
    """The swarm itself. ``port`` is the coordinator's last port (0 = none yet)."""

    id: str
    name: str
    public_key: str
    port: int = 0
    max_peers: int = MAX_PEERS


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A peer that has joined.

    ``is_owner`` marks owners. ``announced`` is the information last sent to other peers about it.
    ``invitation`` is the id of the invitation by which it last joined; empty for founders.
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
    """A peer's use of an invitation, at a unix time."""

    peer: str
    used_at: float


@dataclass(frozen=True, slots=True)
class InvitationRecord:
    """An invitation: the public half of its key, and when it expires (0 = never).

    ``creator`` is the member that requested it; both memberships end together. At most ``max_uses``
    peers may join by it; ``used_by`` lists those that have joined. Times are unix time.
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
        """Number of peers that may still join by the invitation."""
        return self.max_uses - len(self.used_by)


#: A peer to which a model is pinned, and its stage on that peer: ``auto`` or ``A-B``.
Pin = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """A model to serve; ``source`` is the peer that requested it and holds its files.

    ``min_stages`` 0 means ``min_peers``. ``replicas`` is the number of pipelines if there are
    enough peers. With ``pins`` it runs on those peers only, and they run no other model. An
    ``applied`` model is defined in a file (``molink apply``), which alone may change it. A
    ``stopped`` model keeps its settings, but has no pipelines until it is started again.
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
    kv_cache_dtype: KVCacheDType = "auto"

    @property
    def num_pipelines(self) -> int:
        """Number of pipelines that the model should have now."""
        return 0 if self.stopped else self.replicas

    @property
    def target_stages(self) -> int:
        """Minimum number of stages of the ring, if there are enough peers."""
        return self.min_stages or self.min_peers

    @property
    def weight_key(self) -> tuple[object, ...]:
        """All settings whose change makes every stage reload."""
        facts = structs.replace(self.facts, hub="")
        return facts, self.dtype, self.quantize, self.kv_cache_dtype

    @property
    def setup(self) -> StageSetup:
        """How every PC runs its stage."""
        return StageSetup(
            dtype=self.dtype, quantize=self.quantize, kv_cache_dtype=self.kv_cache_dtype
        )

    @property
    def quantization(self) -> Quantize:
        """How projections are quantized: as requested, or as the files are."""
        return self.facts.quantized if self.facts.quantized != "none" else self.quantize


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage of an epoch. ``port``, ``max_blocks`` and ``profile`` are set when it has loaded."""

    peer: str
    layers: LayerRange
    port: int = 0
    max_blocks: int = 0
    profile: Profile = UNKNOWN_PROFILE


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """A pipeline in its newest epoch. ``formed`` means that all stages have loaded, and that
    ``FormPipeline`` may have been sent.
    """

    id: str
    model: str
    epoch: int
    stages: tuple[StageRecord, ...]
    formed: bool = False
    blocks: int = 0
    micro_batches: int = 0
    #: Positions per KV block, at every stage.
    block_size: int = BLOCK_SIZE
    #: Index of the deployment among the model's.
    replica: int = 0

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV the pipeline can hold."""
        return self.blocks * self.block_size
