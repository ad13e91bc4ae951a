"""A whole simulated ring: the product's deciders, with executors, media and clients that aren't."""

from collections.abc import Sequence
from functools import partial

from molink.bench.planned import PlannedRequest
from molink.errors import UsageError
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.head.chunk import max_chunk_rows
from molink.head.head import Head
from molink.head.limits import HeadLimits
from molink.ring.build import LinkSurroundings, RingPlan, Seat, Surroundings, build_ring
from molink.ring.stage import StageShape
from molink.sim.agenda import Agenda
from molink.sim.clients import Clients
from molink.sim.congestion.create import create_controller
from molink.sim.hop import Hop
from molink.sim.medium import IdealMedium, Medium, TcpMedium
from molink.sim.packing import SimPacker
from molink.sim.profiles import MBPS
from molink.sim.scenario import Scenario
from molink.sim.stages import NoRequests, SimExecutor
from molink.sim.timeline import Timeline
from molink.sim.uplink import Uplink
from molink.wire.messages.data import MAX_GROUPS

#: Activations travel as bf16.
DTYPE: DType = "bf16"
EPOCH = 1
BLOCK_SIZE = 16
#: Longest prompt and answer together.
CONTEXT = 32_768
_MAX_WAITING = 1 << 20
#: A ring that serves requests and has no token for so many seconds has lost something.
_STUCK = 600.0
#: How often the KV blocks in use are counted, in virtual seconds.
_COUNT_EVERY = 1.0


class Pipeline:
    """Builds the ring of ``scenario`` and serves ``plan``."""

    def __init__(self, scenario: Scenario, plan: Sequence[PlannedRequest]) -> None:
        self.agenda = Agenda()
        #: Why a stage can't go on; empty while all can.
        self.trouble = ""
        #: The largest share of the KV blocks that was in use.
        self.kv_peak = 0.0
        model = scenario.model_profile
        self._scenario = scenario
        self._stages = scenario.rooflines
        self._profiles = tuple(stage.profile() for stage in self._stages)
        self._hidden = model.hidden * scenario.tensors
        tokens = min(
            stage.kv_tokens(device)
            for stage, device in zip(self._stages, scenario.device_profiles, strict=True)
        )
        if tokens < BLOCK_SIZE:
            raise UsageError(
                f"{scenario.model} doesn't fit into {scenario.stages} x {scenario.device}:"
                " add --stages"
            )
        self._blocks = tokens // BLOCK_SIZE
        rows = max(max_chunk_rows(scenario.chunk_tokens), MAX_GROUPS)
        self._zeros = memoryview(bytes(rows * self._row_bytes))
        many = scenario.stages > 1
        link = scenario.link
        self._uplinks = [Uplink(link.rate, link.queue) for _ in range(scenario.stages)]
        self._hops = [self._make_hop(index) for index in range(scenario.stages)] if many else []
        self._executors: list[SimExecutor] = []
        self._plan = plan
        self._seats = [self._make_seat(index) for index in range(scenario.stages)]
        for index, hop in enumerate(self._hops):
            hop.incoming = self._seats[(index + 1) % scenario.stages].incoming

    def run(self, until: float) -> None:
        """Serve the plan to its end, or until that time."""
        for seat in self._seats:
            seat.start()
        self.clients.start()
        self._look()
        self._count()
        self.agenda.run(until)

    def watch(self, timeline: Timeline) -> None:
        """Tell ``timeline`` who computes and who sends."""
        for index, executor in enumerate(self._executors):
            executor.on_step = partial(timeline.step, index)
        for hop in self._hops:
            hop.on_transfer = timeline.transfer

    def slow(self, stage: int, factor: float, at: float) -> None:
        """From ``at`` on the steps of a stage take ``factor`` times as long as its device's do."""
        executor = self._executors[stage]
        self.agenda.at(at, setattr, executor, "slowed", factor)

    def _look(self) -> None:
        """Whether the ring gets on."""
        if self.clients.waiting_s > _STUCK:
            self._stop(f"no token for {_STUCK:g} s")
        self.agenda.at(self.agenda.now + _STUCK, self._look)

    def _count(self) -> None:
        _, gauges = self._seats[0].stats()
        self.kv_peak = max(self.kv_peak, gauges["head_blocks_used"] / gauges["head_blocks"])
        self.agenda.at(self.agenda.now + _COUNT_EVERY, self._count)

    def _stop(self, trouble: str) -> None:
        self.trouble = self.trouble or trouble
        self.agenda.stop()

    def _pump_head(self) -> None:
        self._seats[0].ring.pump()

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _row_bytes(self) -> int:
        return self._hidden * DTYPE_SIZES[DTYPE]

    def _head_limits(self) -> HeadLimits:
        scenario = self._scenario
        return HeadLimits(
            blocks=self._blocks,
            block_size=BLOCK_SIZE,
            micro_batches=scenario.micro_batches,
            chunk_tokens=scenario.chunk_tokens,
            max_running=scenario.max_running,
            max_waiting=_MAX_WAITING,
            max_context=CONTEXT,
            prefix_cache=False,
            profiles=self._profiles,
            stages=scenario.stages,
            row_bytes=self._row_bytes,
            unpaired=scenario.unpaired,
        )

    def _make_seat(self, index: int) -> Seat:
        scenario, model = self._scenario, self._scenario.model_profile
        shape = StageShape(index, scenario.stages, self._hidden, model.vocabulary, DTYPE)
        executor = SimExecutor(self.agenda, shape, self._stages[index], self._zeros)
        self._executors.append(executor)
        plan = RingPlan(
            EPOCH,
            "",
            shape,
            self._head_limits(),
            CONTEXT,
            self._profiles[index],
            scenario.policy,
            scenario.cut_through,
            scheduling_policy=scenario.scheduling_policy,
        )
        broken = partial(self._broken, index)
        link = self._make_link(index) if self._hops else None
        around = Surroundings(self.agenda, NoRequests(), executor, self._make_clients, broken, link)
        return build_ring(plan, around)

    def _make_clients(self, head: Head) -> Clients:
        self.clients = Clients(self.agenda, head, self._plan, self._pump_head)
        return self.clients

    def _make_link(self, index: int) -> LinkSurroundings:
        scenario = self._scenario
        packs = scenario.compression == "lossless"
        return LinkSurroundings(
            self._hops[index].connect,
            self._hops[index - 1],
            partial(self._broken, index),
            SimPacker(scenario.compression_ratio, self.agenda.time) if packs else None,
        )

    def _make_medium(self, index: int) -> Medium:
        """The way from stage ``index`` to the next."""
        agenda, link = self.agenda, self._scenario.link
        if link.congestion == "none":
            return IdealMedium(agenda, link.rate, link.latency, link.queue)
        return TcpMedium(
            agenda,
            self._uplinks[index],
            self._uplinks[(index + 1) % len(self._uplinks)],
            link.latency,
            link.queue,
            lambda lane: create_controller(link.congestion, 2 * link.latency, lane),
        )

    def _make_hop(self, index: int) -> Hop:
        medium, handling = self._make_medium(index), self._scenario.link.handling
        return Hop(index, self.agenda, medium, handling, self._zeros)

    def _broken(self, stage: int, reason: str) -> None:
        self._stop(f"stage {stage}: {reason}")

    # --- figures ---------------------------------------------------------------------------------

    @property
    def floor_s(self) -> float:
        """Seconds of a turn of the ring that waits for nothing, with a single row."""
        link, stages = self._scenario.link, self._scenario.stages
        facts = LinkFacts(link.latency, link.bandwidth_mbps * MBPS)
        links = (facts,) * stages if stages > 1 else ()
        return RingTimes(self._profiles, links, self._row_bytes).turn_s(1)

    @property
    def max_micro_batches(self) -> int:
        """``K`` at the end."""
        return int(self._seats[0].stats()[1]["head_micro_batches"])

    @property
    def preemptions(self) -> int:
        """How often a request gave its KV blocks up for another."""
        return int(self._seats[0].stats()[0]["head_preemptions_total"])

    @property
    def computed_s(self) -> list[float]:
        """Seconds in which each stage computed."""
        return [executor.busy_s for executor in self._executors]

    @property
    def transferred_s(self) -> list[float]:
        """Seconds in which each link transferred."""
        return [hop.medium.busy_s for hop in self._hops]
