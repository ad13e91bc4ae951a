"""One simulated ring: the product's deciders, with executors and media that aren't."""

from collections.abc import Callable, Sequence
from functools import partial

from molink.facts.ringtimes import LinkFacts
from molink.ring.build import LinkSurroundings, Seat, Surroundings, build_ring
from molink.ring.ends import FrontDesk
from molink.scheduler.head import Head
from molink.sim.agenda import Agenda
from molink.sim.blueprint import Blueprint
from molink.sim.congestion.create import create_controller
from molink.sim.drafter import SimDrafter
from molink.sim.hop import Hop
from molink.sim.medium import IdealMedium, Medium, TcpMedium
from molink.sim.packing import SimPacker
from molink.sim.pc import Pc
from molink.sim.stages import NoRequests, SimExecutor
from molink.sim.texts import token_of
from molink.sim.timeline import Timeline

#: Told which stage can't go on, and why.
OnBroken = Callable[[int, str], None]


class SimRing:
    """A ring of ``blueprint`` over ``pcs``, one for each stage, in virtual time.

    ``desk`` makes the front desk of its head. Rings may share PCs, and PCs their uplinks.
    """

    def __init__(
        self,
        agenda: Agenda,
        blueprint: Blueprint,
        pcs: Sequence[Pc],
        desk: Callable[[Head], FrontDesk],
        on_broken: OnBroken,
        epoch: int = 1,
    ) -> None:
        self.pcs = tuple(pcs)
        self.blueprint = blueprint
        self._agenda = agenda
        self._desk = desk
        self._on_broken = on_broken
        self._epoch = epoch
        count = len(pcs)
        self._hops = [self._make_hop(index) for index in range(count)] if count > 1 else []
        self._executors: list[SimExecutor] = []
        self._seats = [self._make_seat(index) for index in range(count)]
        for index, hop in enumerate(self._hops):
            hop.incoming = self._seats[(index + 1) % count].incoming

    def start(self) -> None:
        """Connect and begin."""
        for seat in self._seats:
            seat.start()

    def close(self) -> None:
        """It is over; what is still under way comes to nothing."""
        for seat in self._seats:
            seat.close()

    def pump(self) -> None:
        """The head has something new."""
        self._seats[0].ring.pump()

    def watch(self, timeline: Timeline) -> None:
        """Tell ``timeline`` who computes and who sends."""
        for index, executor in enumerate(self._executors):
            executor.on_step = partial(timeline.step, index)
        for hop in self._hops:
            hop.on_transfer = timeline.transfer

    # --- parts -----------------------------------------------------------------------------------

    def _make_seat(self, index: int) -> Seat:
        blueprint, agenda = self.blueprint, self._agenda
        roofline, pc = blueprint.stages[index], self.pcs[index]
        requests, texts = NoRequests(), blueprint.scenario.texts

        def token(request: int, position: int) -> int:
            seed = requests.seed(request)
            return texts[seed % len(texts)].token(position) if texts else token_of(seed, position)

        def forced(request: int, position: int) -> Sequence[int]:
            return texts[requests.seed(request) % len(texts)].forced(position) if texts else ()

        shape = blueprint.shape(index)
        executor = SimExecutor(
            agenda,
            shape,
            roofline,
            blueprint.zeros,
            pc,
            requests,
            token,
            forced,
            blueprint.host(index).block_s,
        )
        self._executors.append(executor)
        broken = partial(self._on_broken, index)
        link = self._make_link(index) if self._hops else None
        guesses = blueprint.scenario.draft_roofline if index == 0 else None
        drafter = None if guesses is None else SimDrafter(agenda, guesses, pc, texts)
        around = Surroundings(agenda, requests, executor, self._desk, broken, link, drafter)
        return build_ring(blueprint.plan(index, self._epoch), around)

    def _make_link(self, index: int) -> LinkSurroundings:
        scenario = self.blueprint.scenario
        packs = scenario.compression == "lossless"
        return LinkSurroundings(
            self._hops[index].connect,
            self._hops[index - 1],
            partial(self._on_broken, index),
            SimPacker(scenario.compression_ratio, self._agenda.time) if packs else None,
            keep_warm=scenario.link_from(index).congestion == "cubic",
        )

    def _make_medium(self, index: int) -> Medium:
        """The way from stage ``index`` to the next."""
        agenda, link = self._agenda, self.blueprint.scenario.link_from(index)
        uplink = self.pcs[index].uplink
        if link.congestion == "none":
            return IdealMedium(agenda, uplink, link.latency, link.queue)
        return TcpMedium(
            agenda,
            uplink,
            self.pcs[(index + 1) % len(self.pcs)].uplink,
            link.latency,
            link.queue,
            lambda lane: create_controller(link.congestion, 2 * link.latency, lane),
        )

    def _make_hop(self, index: int) -> Hop:
        blueprint = self.blueprint
        handling = blueprint.scenario.link_from(index).handling
        return Hop(index, self._agenda, self._make_medium(index), handling, blueprint.zeros)

    # --- figures ---------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        """The head, at stage 0."""
        head = self._seats[0].head
        assert head is not None
        return head

    @property
    def links(self) -> tuple[LinkFacts, ...]:
        """Each stage's link to the next one, as far as the first stage knows them."""
        return self._seats[0].ring.links

    def stats(self, stage: int = 0) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of a stage."""
        return self._seats[stage].stats()

    @property
    def waited_s(self) -> list[float]:
        """Seconds in which the steps of each stage waited for copies from or to host memory."""
        return [executor.waited_s for executor in self._executors]

    @property
    def transferred_s(self) -> list[float]:
        """Seconds in which each link transferred."""
        return [hop.medium.busy_s for hop in self._hops]
