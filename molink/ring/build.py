"""Builds one stage of a ring: the scheduler at stage 0, the ring itself, and both links.

The worker, the simulator and the tests' virtual rings all use it, each with its own environment: an
event loop and sockets, or virtual time and a simulated network.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.facts.ring_times import LinkFacts
from molink.link.base import Connect, LinkName, LinkServer, Timers
from molink.link.estimate.estimator import LinkEstimator
from molink.link.in_link import InLink, InLinkEvents
from molink.link.out_link import OutLink, OutLinkEvents
from molink.link.packing.base import Packer
from molink.link.policies.base import ChannelPolicy
from molink.link.policies.create import create_policy
from molink.link.receiver import Arrival, LinkReceiver, ReceiverLimits
from molink.link.recording import RecordingPolicy
from molink.link.sender import LinkSender
from molink.ring.ring import Ring, RingConfig
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.ring.scheduler_bridge import EmissionReceiver, SchedulerBridge
from molink.ring.scoreboard import ScoreboardLimits
from molink.ring.stage import DraftRunner, NextStage, StageRequests, StageShape, StepExecutor
from molink.ring.sub_chunks import SubChunkPolicy, create_sub_chunk_policy
from molink.scheduler.chunk_size import max_chunk_rows
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.scheduler import Scheduler
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES, MAX_SLICES

#: Maximum requests that any scheduler may run; other stages don't know their scheduler's limit.
MAX_REQUESTS = 1024
#: Minimum bytes of rows that a stage must buffer, even if its settings yield less.
MIN_WAITING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Configuration of one stage of a ring for one epoch.

    ``scheduler_limits`` bounds what the scheduler may ask of any stage, and no request has more
    than ``max_model_len`` tokens. ``profile`` and ``host_memory`` describe this stage,
    ``link_policy`` is for its outgoing link, and ``previous_peer`` runs the previous stage.
    ``sub_chunk_policy`` overrides the policy that follows from ``cut_through`` and the profile.
    ``create_draft_source`` makes the draft source of a request.
    """

    epoch: int
    pipeline: str
    shape: StageShape
    scheduler_limits: SchedulerConfig
    max_model_len: int
    profile: Profile
    link_policy: str
    cut_through: bool = True
    previous_peer: str = ""
    sub_chunk_policy: SubChunkPolicy | None = None
    scheduling_policy: str = "fcfs"
    create_draft_source: Callable[[], DraftSource] = PromptLookup
    host_memory: HostMemory = NO_HOST_MEMORY

    @property
    def scoreboard_limits(self) -> ScoreboardLimits:
        """Limits that a well-behaved scheduler and other stages never exceed at this stage."""
        blocks, size = self.scheduler_limits.num_blocks, self.scheduler_limits.block_size
        return ScoreboardLimits(
            max_requests=MAX_REQUESTS + self._max_volumes * MAX_SLICES,
            max_model_len=self.max_model_len,
            max_table_blocks=min(blocks, -(-self.max_model_len // size)),
            blocks=blocks,
            block_size=size,
            waiting_bytes=self._max_bytes,
            host_blocks=self.host_memory.blocks,
        )

    @property
    def _max_bytes(self) -> int:
        """Return twice the bytes of rows that the previous stage should make this stage buffer."""
        # Prefill-only chunks may add as many, if the scheduler sends any.
        chunk = max(max_chunk_rows(self.scheduler_limits.max_num_batched_tokens), MAX_CHUNK_ROWS)
        count = max(self._max_micro_batches, 2 * self.shape.stages)
        rows = 2 * count * (chunk + MAX_SLICES)
        return max(MIN_WAITING_BYTES, rows * self.shape.row_bytes)

    @property
    def _max_micro_batches(self) -> int:
        return self.scheduler_limits.micro_batches or 2 * self.shape.stages

    @property
    def _max_volumes(self) -> int:
        """Return the maximum decode and prefill volumes in flight.

        Prefill-only volumes may outnumber piggybacked ones.
        """
        return self._max_micro_batches + MAX_MICRO_BATCHES


@dataclass(frozen=True, slots=True)
class LinkEnvironment:
    """The environment of a stage's two links.

    ``connect`` creates the connections to the next stage; ``server`` answers the previous one.
    ``on_dead`` is called once, with the reason why the next stage counts as dead. ``remembered`` is
    the link's last known estimate, ``on_estimate`` gets each new one, and ``write_record`` gets the
    lines of a recording of the policy's decisions. ``keep_warm`` is as in :class:`OutLink`.
    """

    connect: Connect
    server: LinkServer
    on_dead: Callable[[str], None]
    packer: Packer | None = None
    remembered: LinkFacts | None = None
    on_estimate: Callable[[LinkFacts], None] | None = None
    write_record: Callable[[bytes], object] | None = None
    keep_warm: bool = False


@dataclass(frozen=True, slots=True)
class StageEnvironment:
    """The environment of a stage.

    ``create_receiver`` creates the scheduler's receiver at stage 0. Without ``link`` the ring has
    no links of its own: either it is a single stage, or the caller passes the next stage to
    :meth:`RingStage.start`. ``on_broken`` is as in :class:`Ring`. ``draft_model`` runs the draft
    model if the scheduler's config has one. ``answer_lengths`` and ``history`` outlive the ring.
    """

    timers: Timers
    requests: StageRequests
    executor: StepExecutor
    create_receiver: Callable[[Scheduler], EmissionReceiver]
    on_broken: Callable[[str], None]
    link: LinkEnvironment | None = None
    draft_model: DraftRunner | None = None
    answer_lengths: AnswerLengths = field(default_factory=AnswerLengths)
    history: AnswerHistory = field(default_factory=AnswerHistory)


@dataclass(frozen=True, slots=True)
class RingStage:
    """One stage's connected deciders. Only stage 0 has a scheduler."""

    ring: Ring
    scheduler: Scheduler | None
    outgoing: OutLink | None
    incoming: InLink | None

    def start(self, next_stage: NextStage | None = None) -> None:
        """Connect and start. Without a link, ``next_stage`` is the next stage, if any."""
        if self.outgoing is not None:
            self.outgoing.start()
        self.ring.open(self.outgoing or next_stage)

    def close(self) -> None:
        """End the epoch."""
        self.ring.close()
        if self.incoming is not None:
            self.incoming.close()
        if self.outgoing is not None:
            self.outgoing.close()

    def collect_stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters, gauges = self.ring.collect_stats()
        if self.scheduler is not None:
            scheduler_counters, scheduler_gauges = self.scheduler.collect_stats()
            counters |= scheduler_counters
            gauges |= scheduler_gauges
        if self.outgoing is not None:
            sent = self.outgoing.stats
            counters |= sent.counters
            gauges |= sent.gauges
        if self.incoming is not None:
            counters |= self.incoming.counters
            gauges |= self.incoming.gauges
        return counters, gauges


def build_ring(plan: RingPlan, environment: StageEnvironment) -> RingStage:
    """Build the stage of ``plan``. It is idle until it is started."""
    scheduler: Scheduler | None = None
    bridge: SchedulerBridge | None = None
    if plan.shape.is_first:
        policy = create_scheduling_policy(plan.scheduling_policy)
        policy.set_answer_lengths(environment.answer_lengths)
        scheduler = Scheduler(
            plan.scheduler_limits,
            plan.epoch,
            policy,
            plan.create_draft_source,
            environment.history,
        )
        bridge = SchedulerBridge(
            scheduler,
            environment.create_receiver(scheduler),
            plan.shape.vocabulary,
            environment.draft_model,
        )
    sub_chunk_policy = plan.sub_chunk_policy or create_sub_chunk_policy(
        plan.profile, cut_through=plan.cut_through, forwards=not plan.shape.is_last
    )
    config = RingConfig(
        plan.shape,
        plan.profile,
        plan.scheduler_limits.profiles,
        plan.scoreboard_limits,
        sub_chunk_policy,
        plan.host_memory,
    )
    ring = Ring(
        config,
        environment.requests,
        environment.executor,
        bridge,
        environment.timers.time,
        environment.on_broken,
    )
    if environment.link is None:
        return RingStage(ring, scheduler, None, None)
    outgoing = _build_out_link(plan, ring, environment.timers, environment.link)
    return RingStage(
        ring, scheduler, outgoing, _build_in_link(plan, ring, environment.timers, environment.link)
    )


def _build_out_link(plan: RingPlan, ring: Ring, timers: Timers, link: LinkEnvironment) -> OutLink:
    def measured(facts: LinkFacts) -> None:
        if link.on_estimate is not None:
            link.on_estimate(facts)
        ring.on_link_measured(facts, timers.time())

    policy: ChannelPolicy = create_policy(plan.link_policy)
    if link.write_record is not None:
        policy = RecordingPolicy(policy, link.write_record)
    return OutLink(
        timers,
        link.connect,
        LinkSender(
            plan.epoch, policy, packer=link.packer, estimator=LinkEstimator(link.remembered)
        ),
        LinkName(plan.pipeline, plan.shape.index),
        OutLinkEvents(lambda: ring.progress, link.on_dead, ring.run_pending, measured),
        probe=True,
        keep_warm=link.keep_warm,
    )


def _build_in_link(plan: RingPlan, ring: Ring, timers: Timers, link: LinkEnvironment) -> InLink:
    def arrived(arrival: Arrival) -> None:
        ring.on_message(arrival.body, arrival.payload, arrival.rows)

    shape, limits = plan.shape, ReceiverLimits(assembly_bytes=plan.scoreboard_limits.waiting_bytes)
    return InLink(
        timers,
        link.server,
        LinkReceiver(plan.epoch, shape.hidden, shape.wire_dtype, limits, plan.cut_through),
        LinkName(plan.pipeline, (shape.index - 1) % shape.stages),
        plan.previous_peer,
        InLinkEvents(lambda: ring.progress, arrived),
    )
