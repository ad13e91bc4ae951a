"""Simulation of many pipelines with shared PCs, churn and a router."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from molink.bench.report import Report, summarize
from molink.bench.workload import PlannedRequest
from molink.errors import UsageError
from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.cache_report import span_digests
from molink.routing.create import create_router
from molink.scheduler.scheduler import Scheduler
from molink.sim.clients import Clients, ServingRing
from molink.sim.event_queue import EventQueue, FleetEventQueue, assign_regions
from molink.sim.fleet_pipeline import FleetPipeline, RingEpoch, RingTemplates
from molink.sim.pc import SimPc, Uplink
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import GRACE_S, disable_gc
from molink.sim.workload import check_ranges

#: Maximum number of pipelines (a sanity limit).
MAX_PIPELINES = 10_000
_HOUR_S = 3600.0
#: Minimum seconds of absence.
_MIN_AWAY_S = 5.0
#: Measured seconds until the end of a connection is detected (``docs/reliability.md``); lost
#: requests are then resubmitted.
LOSS_NOTICE_S = 0.5
#: Measured seconds until a returning PC can hold a stage.
REJOIN_S = 4.7
#: Seconds between cache reports to the router.
REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """``pipelines`` rings like ``ring``, which share its workload.

    Stages run on ``peers`` PCs (0: one PC per stage). With fewer PCs, each holds stages of several
    pipelines; with more, pipelines have spares. ``peers_per_uplink`` PCs share an uplink, mostly
    PCs of different pipelines. A PC leaves ``departures_per_hour`` times per hour on average,
    without notice, for ``away_s`` seconds on average.

    With ``rings`` each pipeline has its own ring, on PCs of its own, and the workload of ``ring``.

    Raises:
        UsageError: a number is out of range, or the router is unknown.
    """

    ring: Scenario
    pipelines: int
    peers: int = 0
    peers_per_uplink: int = 1
    router: str = "least-loaded"
    departures_per_hour: float = 0.0
    away_s: float = 600.0
    rings: tuple[Scenario, ...] = ()

    def __post_init__(self) -> None:
        stages = self.ring.stages
        check_ranges(
            {
                "--pipelines": (self.pipelines, 1, MAX_PIPELINES),
                "--peers": (self.pc_count, stages, MAX_PIPELINES * stages),
                "--peers-per-uplink": (self.peers_per_uplink, 1, self.pc_count),
                "--churn": (self.departures_per_hour, 0, 60),
                "--away": (self.away_s, _MIN_AWAY_S, 24 * _HOUR_S),
            }
        )
        create_router(self.router)
        if self.rings and (len(self.rings) != self.pipelines or self.peers_per_uplink != 1):
            raise UsageError("--pipelines counts the rings, and their PCs share no uplink")

    @property
    def pc_count(self) -> int:
        if self.rings:
            return sum(ring.stages for ring in self.rings)
        return self.peers or self.pipelines * self.ring.stages

    @property
    def tenants(self) -> int:
        """Maximum number of stages per PC."""
        return -(-self.pipelines * self.ring.stages // self.pc_count)

    @property
    def uplink_profiles(self) -> Sequence[LinkProfile]:
        """The link behind each uplink: those of different rings, stage by stage, or all alike."""
        if self.rings:
            return [ring.link_from(stage) for ring in self.rings for stage in range(ring.stages)]
        return [self.ring.link] * -(-self.pc_count // self.peers_per_uplink)

    @property
    def pipeline_pcs(self) -> list[list[int]]:
        """The PCs of each pipeline, spares last."""
        if self.rings:
            ends = accumulate(ring.stages for ring in self.rings)
            return [
                list(range(end - ring.stages, end))
                for ring, end in zip(self.rings, ends, strict=True)
            ]
        stages, count = self.ring.stages, self.pc_count
        found = [
            [(pipeline * stages + stage) % count for stage in range(stages)]
            for pipeline in range(self.pipelines)
        ]
        for spare in range(self.pipelines * stages, count):
            found[spare % self.pipelines].append(spare)
        return found


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Numbers of a pipeline's requests sent, rings formed and rings lost."""

    requests: int
    formed: int
    lost: int


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Results of a fleet simulation.

    ``num_lost`` counts requests that did not complete, ``num_resubmitted`` resubmissions after a
    ring's end, ``num_departures`` PCs that left, and ``num_broken`` rings that failed although all
    PCs were present. ``busy_shares`` is the share of time in which each PC computed, ``virtual_s``
    the simulated time in seconds.
    """

    fleet: FleetScenario
    report: Report
    pipelines: tuple[PipelineFigures, ...]
    busy_shares: tuple[float, ...]
    num_lost: int
    num_resubmitted: int
    num_departures: int
    num_broken: int
    virtual_s: float
    #: Share of prompt tokens found in prefix caches, including the warm-up.
    cached_share: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Return the report and the simulation's figures as plain values."""
        fleet, ring = self.fleet, self.fleet.ring
        return self.report.as_json() | {
            "rate": ring.workload.rate,
            "seed": ring.workload.seed,
            "stages": ring.stages,
            "device": ring.device,
            "model": ring.model,
            "bandwidth_mbps": ring.link.bandwidth_mbps,
            "latency_ms": ring.link.latency_ms,
            "congestion": ring.link.congestion,
            "switches": ring.switches,
            "peers": fleet.pc_count,
            "peers_per_uplink": fleet.peers_per_uplink,
            "router": fleet.router,
            "churn": fleet.departures_per_hour,
            "away_s": fleet.away_s,
            "pipelines": [asdict(each) for each in self.pipelines],
            "busy": list(self.busy_shares),
            "lost": self.num_lost,
            "resubmitted": self.num_resubmitted,
            "left": self.num_departures,
            "broken": self.num_broken,
            "virtual_s": self.virtual_s,
            "cached_share": self.cached_share,
        }


def simulate_fleet(fleet: FleetScenario, router: Router | None = None) -> FleetOutcome:
    """Simulate ``fleet`` until the last request ends; deterministic.

    ``router`` replaces the one that ``fleet`` names.

    Raises:
        UsageError: the scenario is impossible, for example a model too large for the devices.
    """
    workload = fleet.ring.workload
    run = _FleetSimulation(fleet, router if router is not None else create_router(fleet.router))
    with disable_gc():
        run.run(2 * (workload.warmup + workload.duration) + GRACE_S)
    samples = run.clients.collect_samples(workload.warmup)
    plan = workload.plan_requests()
    now = run.event_queue.now
    return FleetOutcome(
        fleet,
        summarize(samples, now - workload.warmup, policy=fleet.ring.policy),
        tuple(
            PipelineFigures(slot.load.total_sent, slot.num_formed, slot.num_lost)
            for slot in run.pipelines
        ),
        tuple(pc.busy_s / now for pc in run.pcs),
        sum(sample.error is not None for sample in samples),
        run.num_resubmitted,
        run.num_departures,
        run.num_broken,
        now,
        run.cached_tokens / sum(request.input_tokens for request in plan),
    )


class _FleetSimulation:
    """State of one simulation; the context of its pipelines."""

    def __init__(self, fleet: FleetScenario, router: Router) -> None:
        ring, count = fleet.ring, fleet.pc_count
        uplinks = [Uplink(link.rate, link.queue) for link in fleet.uplink_profiles]
        self.pcs = [SimPc(uplinks[index % len(uplinks)]) for index in range(count)]
        members = [[self.pcs[index] for index in each] for each in fleet.pipeline_pcs]
        where = assign_regions(members)
        self.events = FleetEventQueue(where)
        self.event_queue = self.events.common
        self.schedule_later = self.events.schedule_later
        self.clients = Clients(self.event_queue, ring.workload.plan_requests(), self._choose_ring)
        self.clients.on_finished = self._on_finished
        self.clients.on_first_token = self._on_first_token
        self.num_resubmitted = self.num_departures = self.num_broken = 0
        self._fleet = fleet
        self.router = router
        #: Cached prompt tokens of the requests that have started.
        self.cached_tokens = 0
        #: Rings that report their caches to the router, with the last reported version of each.
        self._shares = fleet.ring.workload.has_shared_prefixes and self.router.reads_spans
        self._versions: dict[str, tuple[RingEpoch, int]] = {}
        common = RingTemplates(ring, fleet.tenants)
        templates = [RingTemplates(one, 1) for one in fleet.rings] or [common] * fleet.pipelines
        self.pipelines = [
            FleetPipeline(
                PipelineLoad(str(number)),
                pcs,
                templates[number],
                self,
                self.events.region_queue(where[number]),
            )
            for number, pcs in enumerate(members)
        ]
        #: Pipelines that accept requests.
        self._available: list[PipelineLoad] = []
        self._by_name = {slot.load.name: slot for slot in self.pipelines}
        self._random = random.Random(f"churn {ring.workload.seed}")

    def run(self, until: float) -> None:
        """Serve the workload to its end, or until ``until`` virtual seconds."""
        for slot in self.pipelines:
            slot.form_ring()
        self.clients.start()
        if self._fleet.departures_per_hour:
            for pc in self.pcs:
                self._schedule_departure(pc)
        if self.router.reads_spans:
            self._report_caches()
        self.events.run(until)

    def _schedule_departure(self, pc: SimPc) -> None:
        stays = self._random.expovariate(self._fleet.departures_per_hour / _HOUR_S)
        self.event_queue.schedule_at(self.event_queue.now + stays, self._on_departure, pc)

    def _on_departure(self, pc: SimPc) -> None:
        self.num_departures += 1
        pc.is_present = False
        for slot in self.pipelines:
            slot.on_pc_left(pc)
        longer = self._random.expovariate(1.0) * (self._fleet.away_s - _MIN_AWAY_S)
        self.event_queue.schedule_at(
            self.event_queue.now + _MIN_AWAY_S + longer + REJOIN_S, self._on_return, pc
        )

    def _on_return(self, pc: SimPc) -> None:
        pc.is_present = True
        for slot in self.pipelines:
            slot.form_ring()
        self._schedule_departure(pc)

    def create_receiver(self, scheduler: Scheduler) -> Clients:
        return self.clients

    def on_ring_ended(self, epoch: RingEpoch, event_queue: EventQueue) -> None:
        """Resubmit the ring's requests once the loss is detected."""
        keys = self.clients.detach_ring(epoch)
        epoch.remove_requests(len(keys))
        self.num_resubmitted += len(keys)
        self.schedule_later(event_queue, LOSS_NOTICE_S, self.clients.resend_requests, keys)

    def on_ring_broken(self) -> None:
        self.num_broken += 1

    def on_pipelines_changed(self) -> None:
        """Update the available pipelines, and send waiting requests if there were none."""
        waited = not self._available
        self._available = [slot.load for slot in self.pipelines if slot.epoch is not None]
        if waited and self._available:
            self.clients.resend_requests(self.clients.waiting_keys)

    def _choose_ring(self, request: PlannedRequest) -> ServingRing | None:
        if not self._available:
            return None
        spans = span_digests(self.clients.prompt_tokens(request)) if self._shares else ()
        prompt = RoutedPrompt(str(request.index), request.input_tokens, spans)
        slot = self._by_name[
            self.router.choose_pipeline(prompt, self._available, self.event_queue.now).name
        ]
        assert slot.epoch is not None
        slot.epoch.add_request()
        return slot.epoch

    def _on_first_token(self, key: str, cached: int, now: float) -> None:
        self.cached_tokens += cached
        self.events.schedule_common(now, self.router.on_first_token, key, cached, now)

    def _on_finished(
        self, serving: ServingRing | None, key: str, generated: int, now: float
    ) -> None:
        self.events.schedule_common(now, self.router.on_request_end, key, generated, now)
        if isinstance(serving, RingEpoch):
            serving.remove_requests()
            self._by_name[serving.load.name].close_if_idle(serving)

    def _report_caches(self) -> None:
        """Report cache changes of all rings to the router, as if peers polled them."""
        for slot in self.pipelines:
            name, epoch = slot.load.name, slot.epoch
            known, version = self._versions.get(name, (None, -1))
            if known is not None and epoch is not known:
                self.router.on_pipeline_removed(name)
                version = -1
                del self._versions[name]
            if epoch is not None:
                report = epoch.scheduler.cache_report(version)
                self.router.on_cache_report(name, report, self.event_queue.now)
                self._versions[name] = epoch, report.version
        self.event_queue.schedule_at(self.event_queue.now + REPORT_S, self._report_caches)
