"""The swarm of the evening in virtual time, placed as the coordinator does, or once and for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from molink.bench.planned_requests import PlannedRequest
from molink.facts.footprint import StageSetup
from molink.facts.model import LayerRange
from molink.facts.ring_times import HANDLING_S
from molink.scheduler.scheduler import Scheduler
from molink.sim.clients import Clients, ServingRing
from molink.sim.event_queue import EventQueue
from molink.sim.pc import SimPc
from molink.sim.profiles import MBPS, LinkProfile, load_device
from molink.sim.ring import SimRing
from molink.sim.ring_template import RingTemplate
from molink.sim.roofline import memory_for_stages
from molink.sim.scenario import Scenario
from molink.sim.swarm_plan import ModelDescription, make_candidate
from molink.sim.uplink import Uplink
from molink.sim.workload import Workload
from molink.swarm.controller.pipelines import SWITCH_OVER_DELAY
from molink.swarm.controller.planner import DEBOUNCE, LOSS_DEBOUNCE, REVIEW_INTERVAL
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Placement, place_model
from molink.swarm.placement.read_rates import ReadRates, measured_rate
from tools.evening.story import Event, Leave, LinkChange, PaceChange, Return

#: Between two looks of a PC at its links and its pace, in seconds.
_LOOK = 5.0
_REVIEW_EVERY = 1.0
#: Measured, in seconds (docs/reliability.md): until a ring that has lost a PC takes requests again,
#: until those of the lost one are sent again, and until a stage that has to be loaded is there.
_RECOVERY, _NOTICED, _LOADED = 1.12, 0.5, 4.7

Layout = tuple[tuple[str, LayerRange], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen for a swarm: by the product as things change, or fixed.

    ``micro_batches`` and ``chunk`` 0 are left to the head. Unless it ``follows``, a swarm is placed
    by what was known in the beginning; it still goes on without a PC that leaves, and takes it
    back. Those ``without`` get no layers: who knows the evening beforehand does without them.
    """

    name: str
    policy: str = "adaptive"
    micro_batches: int = 0
    chunk: int = 0
    follows: bool = True
    without: tuple[int, ...] = ()


@dataclass(eq=False)
class _Epoch:
    """A ring, with who is in it."""

    layout: Layout
    ring: SimRing

    @property
    def scheduler(self) -> Scheduler:
        return self.ring.scheduler

    def issue_batches(self) -> None:
        self.ring.issue_batches()


@dataclass
class Evening:
    """Plays ``events`` to a swarm of a PC for each of ``devices``, which serves ``plan``."""

    model: ModelDescription
    devices: Sequence[str]
    link: LinkProfile
    choice: Choice
    plan: Sequence[PlannedRequest]
    events: Sequence[Event]
    #: What was decided, for people: when, and by whom which layers are held.
    log: list[tuple[float, Layout]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.agenda = EventQueue()
        self.clients = Clients(self.agenda, self.plan, self._choose)
        count = len(self.devices)
        self._names = [f"pc{index}" for index in range(count)]
        self._pcs = [SimPc(Uplink(self.link.rate, self.link.queue)) for _ in range(count)]
        self._candidates = [
            make_candidate(peer, device)
            for peer, device in zip(self._names, self.devices, strict=True)
        ]
        self._links, self._paces = Links(), ReadRates()
        for by in self._names:
            for to in self._names:
                self._links.record_measurement(by, to, self.link.latency, self.link.rate)
        self._epoch: _Epoch | None = None
        self._epochs = 0
        #: The last change counts of those that are being made.
        self._changes = 0
        self._review_at = 0.0
        #: Why a ring broke by itself; empty if none did.
        self.trouble = ""

    def run(self, until: float) -> None:
        """The whole evening."""
        self._place()
        self.clients.start()
        for event in self.events:
            self.agenda.schedule_at(event.at, self._happen, event)
        if self.choice.follows:
            self._look()
            self._review()
        self.agenda.run(until)

    # --- what happens ----------------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        now, pc = self.agenda.now, self._pcs[event.peer]
        match event:
            case LinkChange(mbps=mbps):
                pc.uplink.rate = mbps * MBPS * self.link.efficiency
            case PaceChange(factor=factor):
                pc.slowdown = factor
            case Leave():
                pc.is_present = False
                peer = self._names[event.peer]
                self._links.drop_peer(peer)
                self._paces.drop_peer(peer)
                if self._epoch is not None and pc in self._epoch.ring.pcs:
                    self._end(self._epoch, _NOTICED)
                    self._epoch = None
                    self.agenda.schedule_at(now + _RECOVERY, self._place)
                else:
                    self.agenda.schedule_at(now + LOSS_DEBOUNCE, self._place)
            case Return():
                pc.is_present = True
                peer = self._names[event.peer]
                for other in self._names:
                    self._links.record_measurement(peer, other, self.link.latency, None)
                self.agenda.schedule_at(now + DEBOUNCE, self._place)

    # --- what the coordinator decides ------------------------------------------------------------

    def _look(self) -> None:
        """What stages tell of their links and paces."""
        now, epoch = self.agenda.now, self._epoch
        if epoch is not None:
            peers = [peer for peer, _ in epoch.layout]
            for stage, facts in enumerate(epoch.ring.links):
                to = peers[(stage + 1) % len(peers)]
                if facts.rate is not None:
                    self._links.record_measurement(peers[stage], to, None, facts.rate)
            for stage, peer in enumerate(peers):
                pace = epoch.ring.stage_stats(stage)[1]["stage_decode_pace"]
                if pace > 0:
                    self._paces.record_slowdown(peer, pace, now)
        self.agenda.schedule_at(now + _LOOK, self._look)

    def _review(self) -> None:
        now = self.agenda.now
        self._paces.expire_slowdowns(now)
        if now >= self._review_at and (self._links.has_changed or self._paces.has_changed):
            self._place()
        self.agenda.schedule_at(now + _REVIEW_EVERY, self._review)

    def _place(self) -> None:
        """Place the model by what is known, and go over to that."""
        now, epoch = self.agenda.now, self._epoch
        self._review_at = now + REVIEW_INTERVAL
        there = [
            one
            for index, (one, pc) in enumerate(zip(self._candidates, self._pcs, strict=True))
            if pc.is_present and index not in self.choice.without
        ]
        known = self._paces.apply_rates(there) if self.choice.follows else tuple(there)
        self._links.mark_placed()
        self._paces.mark_placed(known)
        serving = epoch.layout if epoch is not None and self.choice.follows else ()
        found = place_model(self.model.facts, known, links=self._links, serving=serving)
        if not isinstance(found, Placement):
            return  # what waits, waits until somebody is back
        layout = tuple((stage.peer, stage.layers) for stage in found.stages)
        if epoch is not None and layout == epoch.layout:
            return
        self._changes += 1
        if epoch is None:
            self._take_over(layout, self._changes)
        elif self._has_room(layout, epoch.layout):
            self.agenda.schedule_at(now + _LOADED, self._take_over, layout, self._changes)
        else:
            self._end(epoch, 0.0)
            self._epoch = None
            self.agenda.schedule_at(now + _LOADED, self._take_over, layout, self._changes)

    def _has_room(self, new: Layout, old: Layout) -> bool:
        """Whether who is in both rings can hold both stages."""
        held = dict(old)
        facts = self.model.facts
        for peer, layers in new:
            device = load_device(self.devices[self._names.index(peer)])
            both = [layers, held[peer]] if peer in held else [layers]
            count = sum(last - first for first, last in both)
            if count * facts.layer_bytes > memory_for_stages(device):
                return False
        return True

    def _take_over(self, layout: Layout, change: int) -> None:
        """A ring of that layout is there: it takes the requests."""
        pcs = [self._pcs[self._names.index(peer)] for peer, _ in layout]
        if change != self._changes or not all(pc.is_present for pc in pcs):
            return
        self._epochs += 1
        blueprint = self._blueprint(layout, pcs)
        ring = SimRing(
            self.agenda, blueprint, pcs, lambda _: self.clients, self._broken, self._epochs
        )
        old, self._epoch = self._epoch, _Epoch(layout, ring)
        ring.start()
        self.log.append((self.agenda.now, layout))
        setup = StageSetup()
        for (peer, layers), profile in zip(layout, blueprint.profiles, strict=True):
            one = self._candidates[self._names.index(peer)]
            rate = measured_rate(self.model.facts, one, setup, layers, profile.decode_s(1))
            self._paces.record_profile(peer, (layers, profile, 1), rate)
        if old is not None:
            self.agenda.schedule_at(self.agenda.now + SWITCH_OVER_DELAY, self._end, old, 0.0)
        self.clients.resend_requests(self.clients.waiting_keys)

    def _blueprint(self, layout: Layout, pcs: Sequence[SimPc]) -> RingTemplate:
        """A stage that is loaded measures its steps as they are then."""
        names = [self.devices[self._names.index(peer)] for peer, _ in layout]
        scenario = Scenario(
            Workload(rate=1.0, duration=1.0),
            len(layout),
            model=self.model.name,
            link=replace(self.link, handling_ms=1000 * HANDLING_S),
            policy=self.choice.policy,
            micro_batches=self.choice.micro_batches,
            max_num_batched_tokens=self.choice.chunk,
            devices=tuple(names),
            layers=tuple(last - first for _, (first, last) in layout),
            shape=self.model.shape,
        )
        blueprint = RingTemplate.from_scenario(scenario)
        profiles = zip(blueprint.profiles, pcs, strict=True)
        return replace(
            blueprint, profiles=tuple(profile.scale_by(pc.slowdown) for profile, pc in profiles)
        )

    def _end(self, epoch: _Epoch, after: float) -> None:
        """A ring is over; ``after`` so many seconds its requests are sent again."""
        epoch.ring.close()
        keys = self.clients.detach_ring(epoch)
        self.agenda.schedule_at(
            self.agenda.now + after, partial(self.clients.resend_requests, keys)
        )

    def _broken(self, stage: int, reason: str) -> None:
        self.trouble = f"stage {stage}: {reason}"
        self.agenda.stop()

    def _choose(self, request: PlannedRequest) -> ServingRing | None:
        return self._epoch
