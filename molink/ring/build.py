"""Puts one stage's deciders together: head and front desk at stage 0, ring, and both links.

The product's worker, the simulator and the virtual rings of the tests are all built here, each with
surroundings of its own: an event loop and sockets, or virtual time and what plays the network.
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
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES, MAX_SLICES

#: Requests that any head may run, which other stages aren't told.
MAX_REQUESTS = 1024
#: Bytes of rows that a stage is ready to keep, whatever its own settings make of it.
MIN_WAITING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RingPlan:
    """One stage's place in a ring of one epoch: what it is told, and the switches.

    ``scheduler_limits`` are the bounds of the ring's head, and so of what it may ask of every
    stage; ``max_model_len`` tokens are in the longest request of any head. ``profile`` is this
    stage's own, ``link_policy`` that of its link, ``scheduling_policy`` the head's,
    ``previous_peer`` the one that runs the previous stage. Volumes are cut into pieces as
    ``sub_chunk_policy`` says, or else as ``cut_through`` and the profile do.
    ``create_draft_source`` makes what guesses the tokens of a request. ``host_memory`` is this
    stage's host memory for KV.
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
        """What an honest head and honest stages never exceed here."""
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
        """Bytes of rows that the previous stage may have us keep: twice what we expect of it."""
        # Chunks that go unpaired may have as many, in all; whether they do, the head decides.
        chunk = max(max_chunk_rows(self.scheduler_limits.max_num_batched_tokens), MAX_CHUNK_ROWS)
        count = max(self._max_micro_batches, 2 * self.shape.stages)
        rows = 2 * count * (chunk + MAX_SLICES)
        return max(MIN_WAITING_BYTES, rows * self.shape.row_bytes)

    @property
    def _max_micro_batches(self) -> int:
        """Micro-batches that there may be in flight, whoever decides that."""
        return self.scheduler_limits.micro_batches or 2 * self.shape.stages

    @property
    def _max_volumes(self) -> int:
        """Decode and prefill volumes in flight; of the latter more may go unpaired than paired."""
        return self._max_micro_batches + MAX_MICRO_BATCHES


@dataclass(frozen=True, slots=True)
class LinkEnvironment:
    """What a stage's two links have around them.

    ``connect`` makes the channels to the next stage, and the previous one is answered through
    ``server``. ``on_dead`` is told, once, why the next stage is dead. ``remembered`` is what is
    remembered of the link; ``on_estimate`` is told what it is measured to be, ``write_record``
    takes lines of a recording of its decisions. ``keep_warm`` is as of :class:`OutLink`.
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
    """What a stage has around it; ``create_receiver`` is asked for the front desk of the head at
    stage 0.

    Without ``link`` the ring has no links of its own: it is a whole one, or who opens it says what
    follows. ``on_broken`` is as :class:`Ring` says. ``draft_model`` is what the head asks for
    drafts, where its limits say that there is one. What is known of answers' lengths
    (``answer_lengths``) outlives the ring.
    """

    timers: Timers
    requests: StageRequests
    executor: StepExecutor
    create_receiver: Callable[[Scheduler], EmissionReceiver]
    on_broken: Callable[[str], None]
    link: LinkEnvironment | None = None
    draft_model: DraftRunner | None = None
    answer_lengths: AnswerLengths = field(default_factory=AnswerLengths)


@dataclass(frozen=True, slots=True)
class RingStage:
    """One stage's deciders, wired to each other; the head is at stage 0."""

    ring: Ring
    scheduler: Scheduler | None
    outgoing: OutLink | None
    incoming: InLink | None

    def start(self, next_stage: NextStage | None = None) -> None:
        """Connect and begin; without a link, ``next_stage`` is the next stage, if there is one."""
        if self.outgoing is not None:
            self.outgoing.start()
        self.ring.open(self.outgoing or next_stage)

    def close(self) -> None:
        """The epoch is over."""
        self.ring.close()
        if self.incoming is not None:
            self.incoming.close()
        if self.outgoing is not None:
            self.outgoing.close()

    def collect_stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters, gauges = self.ring.collect_stats()
        if self.scheduler is not None:
            head_counters, head_gauges = self.scheduler.collect_stats()
            counters |= head_counters
            gauges |= head_gauges
        if self.outgoing is not None:
            sent = self.outgoing.stats
            counters |= sent.counters
            gauges |= sent.gauges
        if self.incoming is not None:
            counters |= self.incoming.counters
            gauges |= self.incoming.gauges
        return counters, gauges


def build_ring(plan: RingPlan, environment: StageEnvironment) -> RingStage:
    """The stage of ``plan``; it does nothing before it is started."""
    scheduler: Scheduler | None = None
    bridge: SchedulerBridge | None = None
    if plan.shape.is_first:
        policy = create_scheduling_policy(plan.scheduling_policy)
        policy.set_answer_lengths(environment.answer_lengths)
        scheduler = Scheduler(plan.scheduler_limits, plan.epoch, policy, plan.create_draft_source)
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
