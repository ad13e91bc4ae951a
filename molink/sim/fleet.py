"""Many pipelines in one virtual time: PCs that are shared, that leave and return, and a router."""

import random
from dataclasses import asdict, dataclass

from molink.bench.planned import PlannedRequest
from molink.bench.report import Report, summarize
from molink.errors import UsageError
from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.create import create_router
from molink.routing.spans import span_digests
from molink.scheduler.head import Head
from molink.sim.agenda import Agenda
from molink.sim.clients import Clients, ServingRing
from molink.sim.fleet_time import FleetTime, regions
from molink.sim.pc import Pc
from molink.sim.scenario import Scenario
from molink.sim.simulate import GRACE, no_collector
from molink.sim.slot import Blueprints, Epoch, Slot
from molink.sim.uplink import Uplink

#: Pipelines of one simulation: a bound against a slip of the pen.
MAX_PIPELINES = 10_000
_HOUR = 3600.0
#: A PC that leaves stays away for at least so many seconds.
_LEAST_AWAY = 5.0
#: What follows are seconds, as measured (``docs/reliability.md``). Requests that were lost are sent
#: again after so many: that long it takes to notice that the connection has ended.
NOTICED = 0.5
#: A PC that returns can hold a stage after so many.
JOINED = 4.7
#: A router hears of caches as often.
REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class FleetScenario:
    """``pipelines`` rings as ``ring`` has it, whose workload is that of all of them together.

    There are ``peers`` PCs (0: as many as stages). Where there are fewer, PCs hold stages of
    several pipelines; where there are more, pipelines have spares. So many as ``homes`` share an
    uplink, those of one home mostly in different pipelines. A PC leaves ``churn`` times an hour on
    average, without a word, and is away for ``away`` seconds on average.

    Raises:
        UsageError: a number is out of range, or there is no such router.
    """

    ring: Scenario
    pipelines: int
    peers: int = 0
    homes: int = 1
    router: str = "least-loaded"
    churn: float = 0.0
    away: float = 600.0

    def __post_init__(self) -> None:
        stages = self.ring.stages
        bounds: dict[str, tuple[float, float, float]] = {
            "--pipelines": (self.pipelines, 1, MAX_PIPELINES),
            "--peers": (self.pc_count, stages, MAX_PIPELINES * stages),
            "--peers-per-uplink": (self.homes, 1, self.pc_count),
            "--churn": (self.churn, 0, 60),
            "--away": (self.away, _LEAST_AWAY, 24 * _HOUR),
        }
        for option, (value, minimum, maximum) in bounds.items():
            if not minimum <= value <= maximum:
                raise UsageError(
                    f"{option} has to be from {minimum:g} to {maximum:g}, not {value:g}"
                )
        create_router(self.router)

    @property
    def pc_count(self) -> int:
        """PCs in all."""
        return self.peers or self.pipelines * self.ring.stages

    @property
    def tenants(self) -> int:
        """Stages that a PC holds at most."""
        return -(-self.pipelines * self.ring.stages // self.pc_count)

    @property
    def members(self) -> list[list[int]]:
        """The PCs of each pipeline, spares last."""
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
    """Of one pipeline: requests that it was sent, rings that it had, and those that it lost."""

    requests: int
    formed: int
    lost: int


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """What a simulation of a fleet found.

    ``lost`` requests have not had all of their tokens; ``resubmitted`` counts how often one was
    sent again because its ring had ended, ``left`` how often a PC left, ``broken`` how often a ring
    could not go on though all of its PCs were there. ``busy`` is the share of the time in which
    each PC computed. ``virtual_s`` is how long it took.
    """

    fleet: FleetScenario
    report: Report
    pipelines: tuple[PipelineFigures, ...]
    busy: tuple[float, ...]
    lost: int
    resubmitted: int
    left: int
    broken: int
    virtual_s: float
    #: Share of the prompts' tokens that prefix caches had, the warm-up's included.
    cached: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Plain values to be dumped: those of the report, and the simulation's own."""
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
            "peers_per_uplink": fleet.homes,
            "router": fleet.router,
            "churn": fleet.churn,
            "away_s": fleet.away,
            "pipelines": [asdict(each) for each in self.pipelines],
            "busy": list(self.busy),
            "lost": self.lost,
            "resubmitted": self.resubmitted,
            "left": self.left,
            "broken": self.broken,
            "virtual_s": self.virtual_s,
            "cached_share": self.cached,
        }


def simulate_fleet(fleet: FleetScenario, router: Router | None = None) -> FleetOutcome:
    """Run ``fleet`` until the last request is over; the same fleet always has the same outcome.

    ``router`` is used instead of the one that ``fleet`` names.

    Raises:
        UsageError: it makes no sense: a model too large for the devices, say.
    """
    workload = fleet.ring.workload
    run = _Run(fleet, router if router is not None else create_router(fleet.router))
    with no_collector():
        run.run(2 * (workload.warmup + workload.duration) + GRACE)
    samples = run.clients.samples(workload.warmup)
    plan = workload.plan()
    now = run.agenda.now
    return FleetOutcome(
        fleet,
        summarize(samples, now - workload.warmup, policy=fleet.ring.policy),
        tuple(PipelineFigures(slot.load.sent, slot.formed, slot.lost) for slot in run.slots),
        tuple(pc.busy_s / now for pc in run.pcs),
        sum(sample.error is not None for sample in samples),
        run.resubmitted,
        run.left,
        run.broken,
        now,
        run.cached / sum(request.input_tokens for request in plan),
    )


class _Run:
    """Everything of one simulation. It is the surroundings of its slots."""

    def __init__(self, fleet: FleetScenario, router: Router) -> None:
        ring, count = fleet.ring, fleet.pc_count
        uplinks = [Uplink(ring.link.rate, ring.link.queue) for _ in range(-(-count // fleet.homes))]
        self.pcs = [Pc(uplinks[index % len(uplinks)]) for index in range(count)]
        members = [[self.pcs[index] for index in each] for each in fleet.members]
        where = regions(members)
        self.time = FleetTime(where)
        self.agenda = self.time.common
        self.later = self.time.later
        self.clients = Clients(self.agenda, ring.workload.plan(), self._choose)
        self.clients.on_over = self._over
        self.clients.on_first = self._first
        self.resubmitted = self.left = self.broken = 0
        self._fleet = fleet
        self.router = router
        #: Prompt tokens that caches had, of the requests that have begun.
        self.cached = 0
        #: Heads report to a router that reads spans: the rings that there were, and what they said.
        self._shares = fleet.ring.workload.shares and self.router.reads_spans
        self._versions: dict[str, tuple[Epoch, int]] = {}
        blueprints = Blueprints(ring, fleet.tenants)
        self.slots = [
            Slot(PipelineLoad(str(number)), pcs, blueprints, self, self.time.of(where[number]))
            for number, pcs in enumerate(members)
        ]
        #: Those that take requests.
        self._up: list[PipelineLoad] = []
        #: By name.
        self._named = {slot.load.name: slot for slot in self.slots}
        self._chance = random.Random(f"churn {ring.workload.seed}")

    def run(self, until: float) -> None:
        """Serve the workload to its end, or until that time."""
        for slot in self.slots:
            slot.form()
        self.clients.start()
        if self._fleet.churn:
            for pc in self.pcs:
                self._stay(pc)
        if self.router.reads_spans:
            self._report()
        self.time.run(until)

    # --- PCs that come and go --------------------------------------------------------------------

    def _stay(self, pc: Pc) -> None:
        stays = self._chance.expovariate(self._fleet.churn / _HOUR)
        self.agenda.at(self.agenda.now + stays, self._leave, pc)

    def _leave(self, pc: Pc) -> None:
        self.left += 1
        pc.there = False
        for slot in self.slots:
            slot.gone(pc)
        longer = self._chance.expovariate(1.0) * (self._fleet.away - _LEAST_AWAY)
        self.agenda.at(self.agenda.now + _LEAST_AWAY + longer + JOINED, self._return, pc)

    def _return(self, pc: Pc) -> None:
        pc.there = True
        for slot in self.slots:
            slot.form()
        self._stay(pc)

    # --- what pipelines ask, and tell ------------------------------------------------------------

    def desk(self, head: Head) -> Clients:
        """The front desk of every head."""
        return self.clients

    def ended(self, epoch: Epoch, agenda: Agenda) -> None:
        """Its requests are sent again, once that is noticed."""
        keys = self.clients.forsake(epoch)
        epoch.over(len(keys))
        self.resubmitted += len(keys)
        self.later(agenda, NOTICED, self.clients.resend, keys)

    def broke(self) -> None:
        """A ring can't go on though all of its PCs are there."""
        self.broken += 1

    def changed(self) -> None:
        """Other pipelines take requests than before; what waited for one is sent."""
        waited = not self._up
        self._up = [slot.load for slot in self.slots if slot.epoch is not None]
        if waited and self._up:
            self.clients.resend(self.clients.waiting)

    # --- requests --------------------------------------------------------------------------------

    def _choose(self, request: PlannedRequest) -> ServingRing | None:
        if not self._up:
            return None
        spans = span_digests(self.clients.prompt(request)) if self._shares else ()
        prompt = RoutedPrompt(str(request.index), request.input_tokens, spans)
        slot = self._named[self.router.choose(prompt, self._up, self.agenda.now).name]
        assert slot.epoch is not None
        slot.epoch.begun()
        return slot.epoch

    def _first(self, key: str, cached: int, now: float) -> None:
        self.cached += cached
        self.time.tell(now, self.router.began, key, cached, now)

    def _over(self, serving: ServingRing | None, key: str, generated: int, now: float) -> None:
        self.time.tell(now, self.router.over, key, generated, now)
        if isinstance(serving, Epoch):
            serving.over()
            self._named[serving.load.name].rest(serving)

    def _report(self) -> None:
        """Every head says what has changed in its cache, as daemons ask it."""
        for slot in self.slots:
            name, epoch = slot.load.name, slot.epoch
            known, version = self._versions.get(name, (None, -1))
            if known is not None and epoch is not known:
                self.router.gone(name)
                version = -1
                del self._versions[name]
            if epoch is not None:
                report = epoch.head.cache_report(version)
                self.router.reported(name, report, self.agenda.now)
                self._versions[name] = epoch, report.version
        self.agenda.at(self.agenda.now + REPORT_S, self._report)
