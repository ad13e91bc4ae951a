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
from molink.head.policies.create import create_scheduling_policy
from molink.link.policies.create import create_policy
from molink.link.receiver import Arrival, LinkReceiver, ReceiverLimits
from molink.link.sender import LinkSender
from molink.ring.board_limits import BoardLimits
from molink.ring.ring import Ring
from molink.ring.segment import StageShape
from molink.sim.agenda import Agenda
from molink.sim.clients import Clients
from molink.sim.congestion.create import create_controller
from molink.sim.hop import Hop
from molink.sim.medium import IdealMedium, Medium, TcpMedium
from molink.sim.packing import SimPacker
from molink.sim.profiles import MBPS
from molink.sim.roofline import rooflines
from molink.sim.scenario import Scenario
from molink.sim.stages import NoRequests, SimExecutor
from molink.sim.timeline import Timeline
from molink.sim.uplink import Uplink
from molink.wire.messages.data import MAX_GROUPS, MAX_MICRO_BATCHES

#: Activations travel as bf16.
DTYPE: DType = "bf16"
EPOCH = 1
BLOCK_SIZE = 16
#: Longest prompt and answer together.
CONTEXT = 32_768
#: Bytes of rows that a stage may be kept waiting with: nobody floods anybody here.
_WAITING_BYTES = 8 << 30
_MAX_WAITING = 1 << 20
#: A ring that serves requests and has no token for so many seconds has lost something.
_STUCK = 600.0


class Pipeline:
    """Builds the ring of ``scenario`` and serves ``plan``."""

    def __init__(self, scenario: Scenario, plan: Sequence[PlannedRequest]) -> None:
        self.agenda = Agenda()
        #: Why a stage can't go on; empty while all can.
        self.trouble = ""
        device, model = scenario.device_profile, scenario.model_profile
        self._scenario = scenario
        self._stages = rooflines(device, model, scenario.stages)
        self._profiles = tuple(stage.profile() for stage in self._stages)
        self._hidden = model.hidden * scenario.tensors
        tokens = min(stage.kv_tokens(device) for stage in self._stages)
        if tokens < BLOCK_SIZE:
            raise UsageError(
                f"{scenario.model} doesn't fit into {scenario.stages} x {scenario.device}:"
                " add --stages"
            )
        self._blocks = tokens // BLOCK_SIZE
        rows = max(max_chunk_rows(scenario.chunk_tokens), MAX_GROUPS)
        self._zeros = memoryview(bytes(rows * self._row_bytes))
        policy = create_scheduling_policy(scenario.scheduling_policy)
        self._head = Head(self._head_limits(), EPOCH, policy)
        self.clients = Clients(self.agenda, self._head, plan, self._pump_head)
        self._executors: list[SimExecutor] = []
        self._rings = [self._make_ring(index) for index in range(scenario.stages)]
        many = scenario.stages > 1
        link = scenario.link
        self._uplinks = [Uplink(link.rate, link.queue) for _ in range(scenario.stages)]
        self._hops = [self._make_hop(index) for index in range(scenario.stages)] if many else []

    def run(self, until: float) -> None:
        """Serve the plan to its end, or until that time."""
        for hop in self._hops:
            hop.connect()
        for index, ring in enumerate(self._rings):
            ring.open(self._hops[index] if self._hops else None)
        self.clients.start()
        self._look()
        self.agenda.run(until)

    def watch(self, timeline: Timeline) -> None:
        """Tell ``timeline`` who computes and who sends."""
        for index, executor in enumerate(self._executors):
            executor.on_step = partial(timeline.step, index)
        for hop in self._hops:
            hop.on_transfer = timeline.transfer

    def _look(self) -> None:
        """Whether the ring gets on."""
        if self.clients.waiting_s > _STUCK:
            self._stop(f"no token for {_STUCK:g} s")
        self.agenda.at(self.agenda.now + _STUCK, self._look)

    def _stop(self, trouble: str) -> None:
        self.trouble = self.trouble or trouble
        self.agenda.stop()

    def _pump_head(self) -> None:
        self._rings[0].pump()

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
        )

    def _make_ring(self, index: int) -> Ring:
        is_last = index == self._scenario.stages - 1
        vocabulary = self._scenario.model_profile.vocabulary
        shape = StageShape(is_last, self._hidden, vocabulary, DTYPE, index, self._scenario.stages)
        executor = SimExecutor(self.agenda, shape, self._stages[index], self._zeros)
        self._executors.append(executor)
        return Ring(
            shape,
            NoRequests(),
            executor,
            self._head if index == 0 else None,
            self.clients if index == 0 else None,
            self._profiles[index],
            partial(self._broken, index),
            self._clock,
            self._board_limits(),
            cut_through=self._scenario.cut_through,
            profiles=self._profiles,
        )

    def _board_limits(self) -> BoardLimits:
        scenario = self._scenario
        return BoardLimits(
            requests=scenario.max_running + 2 * MAX_MICRO_BATCHES * MAX_GROUPS,
            context=CONTEXT,
            table=self._blocks,
            blocks=self._blocks,
            block_size=BLOCK_SIZE,
            waiting_bytes=_WAITING_BYTES,
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
        scenario = self._scenario
        own, following = self._rings[index], self._rings[(index + 1) % len(self._rings)]
        packer = None
        if scenario.compression == "lossless":
            packer = SimPacker(scenario.compression_ratio, self._clock)

        def arrived(arrival: Arrival) -> None:
            following.arrive(arrival.body, arrival.payload, arrival.rows)

        return Hop(
            index,
            self.agenda,
            LinkSender(EPOCH, create_policy(scenario.policy), packer=packer),
            LinkReceiver(
                EPOCH,
                self._hidden,
                DTYPE,
                ReceiverLimits(assembly=_WAITING_BYTES),
                scenario.cut_through,
            ),
            self._make_medium(index),
            self._scenario.link.handling,
            self._zeros,
            arrived,
            own.pump,
            lambda facts: own.link_measured(facts, self.agenda.now),
        )

    def _clock(self) -> float:
        return self.agenda.now

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
        return int(self._head.stats()[1]["head_micro_batches"])

    @property
    def computed_s(self) -> list[float]:
        """Seconds in which each stage computed."""
        return [executor.busy_s for executor in self._executors]

    @property
    def transferred_s(self) -> list[float]:
        """Seconds in which each link transferred."""
        return [hop.medium.busy_s for hop in self._hops]
