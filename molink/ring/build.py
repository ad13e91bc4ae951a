"""Puts one stage's deciders together: head and front desk at stage 0, ring, and both links.

The product's worker, the simulator and the virtual rings of the tests are all built here, each with
surroundings of its own: an event loop and sockets, or virtual time and what plays the network.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from molink.facts.profile import MAX_CHUNK_ROWS, Profile
from molink.facts.ringtimes import LinkFacts
from molink.link.ends import Answering, Connect, LinkName, Timers
from molink.link.estimate.estimator import LinkEstimator
from molink.link.incoming import InLink, InLinkEvents
from molink.link.outgoing import OutLink, OutLinkEvents
from molink.link.packing.packing import Packer
from molink.link.policies.base import LanePolicy
from molink.link.policies.create import create_policy
from molink.link.receiver import Arrival, LinkReceiver, ReceiverLimits
from molink.link.recording import RecordedPolicy
from molink.link.sender import LinkSender
from molink.ring.ends import Front, FrontDesk
from molink.ring.hosted import NO_ROOM, HostRoom
from molink.ring.known import BoardLimits
from molink.ring.pieces import Cutting, create_cutting
from molink.ring.ring import Ring, RingConfig
from molink.ring.stage import Executing, Guesser, NextStage, StageRequests, StageShape
from molink.scheduler.chunk import max_chunk_rows
from molink.scheduler.head import Head
from molink.scheduler.limits import HeadLimits
from molink.scheduler.policies.create import create_scheduling_policy
from molink.scheduler.policies.lengths import AnswerLengths
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.lookup import PromptLookup
from molink.wire.messages.data import MAX_GROUPS, MAX_MICRO_BATCHES

#: Requests that any head may run, which other stages aren't told.
MAX_RUNNING = 1024
#: Bytes of rows that a stage is ready to keep, whatever its own settings make of it.
MIN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RingPlan:
    """One stage's place in a ring of one epoch: what it is told, and the switches.

    ``head`` are the bounds of the ring's head, and so of what it may ask of every stage;
    ``context`` tokens are in the longest request of any head. ``profile`` is this stage's own,
    ``link_policy`` that of its link, ``scheduling_policy`` the head's, ``previous_peer`` the one
    that runs the previous stage. Volumes are cut into pieces as ``cutting`` says, or else as
    ``cut_through`` and the profile do. ``source`` makes what guesses the tokens of a request.
    ``host`` is this stage's host memory for KV.
    """

    epoch: int
    pipeline: str
    shape: StageShape
    head: HeadLimits
    context: int
    profile: Profile
    link_policy: str
    cut_through: bool = True
    previous_peer: str = ""
    cutting: Cutting | None = None
    scheduling_policy: str = "fcfs"
    source: Callable[[], DraftSource] = PromptLookup
    host: HostRoom = NO_ROOM

    @property
    def board(self) -> BoardLimits:
        """What an honest head and honest stages never exceed here."""
        blocks, size = self.head.blocks, self.head.block_size
        return BoardLimits(
            requests=MAX_RUNNING + self._max_volumes * MAX_GROUPS,
            context=self.context,
            table=min(blocks, -(-self.context // size)),
            blocks=blocks,
            block_size=size,
            waiting_bytes=self._max_bytes,
            host_blocks=self.host.blocks,
        )

    @property
    def _max_bytes(self) -> int:
        """Bytes of rows that the previous stage may have us keep: twice what we expect of it."""
        # Chunks that go unpaired may have as many, in all; whether they do, the head decides.
        chunk = max(max_chunk_rows(self.head.chunk_tokens), MAX_CHUNK_ROWS)
        count = max(self._max_micro_batches, 2 * self.shape.stages)
        rows = 2 * count * (chunk + MAX_GROUPS)
        return max(MIN_BYTES, rows * self.shape.row_bytes)

    @property
    def _max_micro_batches(self) -> int:
        """Micro-batches that there may be in flight, whoever decides that."""
        return self.head.micro_batches or 2 * self.shape.stages

    @property
    def _max_volumes(self) -> int:
        """Decode and prefill volumes in flight; of the latter more may go unpaired than paired."""
        return self._max_micro_batches + MAX_MICRO_BATCHES


@dataclass(frozen=True, slots=True)
class LinkSurroundings:
    """What a stage's two links have around them.

    ``connect`` makes the channels to the next stage, and the previous one is answered through
    ``server``. ``on_dead`` is told, once, why the next stage is dead. ``known`` is what is
    remembered of the link; ``on_estimate`` is told what it is measured to be, ``record`` takes
    lines of a recording of its decisions. ``keep_warm`` is as of :class:`OutLink`.
    """

    connect: Connect
    server: Answering
    on_dead: Callable[[str], None]
    packer: Packer | None = None
    known: LinkFacts | None = None
    on_estimate: Callable[[LinkFacts], None] | None = None
    record: Callable[[bytes], object] | None = None
    keep_warm: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a stage has around it; ``desk`` is asked for the front desk of the head at stage 0.

    Without ``link`` the ring has no links of its own: it is a whole one, or who opens it says what
    follows. ``on_broken`` is as :class:`Ring` says. ``draft_model`` is what the head asks for
    drafts, where its limits say that there is one. What is known of answers' lengths (``answers``)
    outlives the ring.
    """

    timers: Timers
    requests: StageRequests
    executor: Executing
    desk: Callable[[Head], FrontDesk]
    on_broken: Callable[[str], None]
    link: LinkSurroundings | None = None
    draft_model: Guesser | None = None
    answers: AnswerLengths = field(default_factory=AnswerLengths)


@dataclass(frozen=True, slots=True)
class Seat:
    """One stage's deciders, wired to each other; the head is at stage 0."""

    ring: Ring
    head: Head | None
    outgoing: OutLink | None
    incoming: InLink | None

    def start(self, following: NextStage | None = None) -> None:
        """Connect and begin; without a link, ``following`` is the next stage, if there is one."""
        if self.outgoing is not None:
            self.outgoing.start()
        self.ring.open(self.outgoing or following)

    def close(self) -> None:
        """The epoch is over."""
        self.ring.close()
        if self.incoming is not None:
            self.incoming.close()
        if self.outgoing is not None:
            self.outgoing.close()

    def stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of this epoch, by name."""
        counters, gauges = self.ring.stats()
        if self.head is not None:
            head_counters, head_gauges = self.head.stats()
            counters |= head_counters
            gauges |= head_gauges
        if self.outgoing is not None:
            sent = self.outgoing.stats
            counters |= sent.counts
            gauges |= sent.gauges
        if self.incoming is not None:
            counters |= self.incoming.counts
            gauges |= self.incoming.gauges
        return counters, gauges


def build_ring(plan: RingPlan, around: Surroundings) -> Seat:
    """The stage of ``plan``; it does nothing before it is started."""
    head: Head | None = None
    front: Front | None = None
    if plan.shape.is_first:
        policy = create_scheduling_policy(plan.scheduling_policy)
        policy.set_answers(around.answers)
        head = Head(plan.head, plan.epoch, policy, plan.source)
        front = Front(head, around.desk(head), plan.shape.vocabulary, around.draft_model)
    cutting = plan.cutting or create_cutting(
        plan.profile, cut_through=plan.cut_through, forwards=not plan.shape.is_last
    )
    config = RingConfig(
        plan.shape, plan.profile, plan.head.profiles, plan.board, cutting, plan.host
    )
    ring = Ring(
        config, around.requests, around.executor, front, around.timers.time, around.on_broken
    )
    if around.link is None:
        return Seat(ring, head, None, None)
    outgoing = _outgoing(plan, ring, around.timers, around.link)
    return Seat(ring, head, outgoing, _incoming(plan, ring, around.timers, around.link))


def _outgoing(plan: RingPlan, ring: Ring, timers: Timers, link: LinkSurroundings) -> OutLink:
    def measured(facts: LinkFacts) -> None:
        if link.on_estimate is not None:
            link.on_estimate(facts)
        ring.link_measured(facts, timers.time())

    policy: LanePolicy = create_policy(plan.link_policy)
    if link.record is not None:
        policy = RecordedPolicy(policy, link.record)
    return OutLink(
        timers,
        link.connect,
        LinkSender(plan.epoch, policy, packer=link.packer, estimator=LinkEstimator(link.known)),
        LinkName(plan.pipeline, plan.shape.index),
        OutLinkEvents(lambda: ring.progress, link.on_dead, ring.pump, measured),
        probe=True,
        keep_warm=link.keep_warm,
    )


def _incoming(plan: RingPlan, ring: Ring, timers: Timers, link: LinkSurroundings) -> InLink:
    def arrived(arrival: Arrival) -> None:
        ring.arrive(arrival.body, arrival.payload, arrival.rows)

    shape, limits = plan.shape, ReceiverLimits(assembly=plan.board.waiting_bytes)
    return InLink(
        timers,
        link.server,
        LinkReceiver(plan.epoch, shape.hidden, shape.dtype, limits, plan.cut_through),
        LinkName(plan.pipeline, (shape.index - 1) % shape.stages),
        plan.previous_peer,
        InLinkEvents(lambda: ring.progress, arrived),
    )
