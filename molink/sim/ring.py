"""A simulated ring: the real scheduler, stages and links with simulated executors and networks."""

from collections.abc import Callable, Sequence
from functools import partial

from molink.facts.ring_times import LinkFacts
from molink.ring.build import LinkEnvironment, RingStage, StageEnvironment, build_ring
from molink.ring.scheduler_bridge import EmissionReceiver
from molink.scheduler.scheduler import Scheduler
from molink.sim.congestion.create import create_controller
from molink.sim.event_queue import EventQueue
from molink.sim.executor import SimDrafter, SimExecutor, SimStageRequests
from molink.sim.hop import Hop, SimPacker
from molink.sim.known_text import token_of
from molink.sim.link_model import IdealLink, LinkModel, TcpLink
from molink.sim.pc import SimPc
from molink.sim.ring_template import RingTemplate
from molink.sim.timeline import Timeline

#: Called with the failed stage and the reason.
OnBroken = Callable[[int, str], None]


class SimRing:
    """A ring of ``template`` over ``pcs``, one per stage, in virtual time.

    ``create_receiver`` creates the receiver of the scheduler's emissions. Rings may share PCs, and
    PCs may share uplinks.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        template: RingTemplate,
        pcs: Sequence[SimPc],
        create_receiver: Callable[[Scheduler], EmissionReceiver],
        on_broken: OnBroken,
        epoch: int = 1,
    ) -> None:
        self.pcs = tuple(pcs)
        self.template = template
        self._event_queue = event_queue
        self._create_receiver = create_receiver
        self._on_broken = on_broken
        self._epoch = epoch
        count = len(pcs)
        self._hops = [self._make_hop(index) for index in range(count)] if count > 1 else []
        self._executors: list[SimExecutor] = []
        self._stages = [self._make_stage(index) for index in range(count)]
        for index, hop in enumerate(self._hops):
            hop.incoming = self._stages[(index + 1) % count].incoming

    def start(self) -> None:
        for stage in self._stages:
            stage.start()

    def close(self) -> None:
        """End the ring; pending events have no effect."""
        for stage in self._stages:
            stage.close()

    def issue_batches(self) -> None:
        """Issue batches after a new request."""
        self._stages[0].ring.run_pending()

    def record_timeline(self, timeline: Timeline) -> None:
        """Record steps and transfers in ``timeline``."""
        for index, executor in enumerate(self._executors):
            executor.on_step = partial(timeline.add_step, index)
        for hop in self._hops:
            hop.on_transfer = timeline.add_transfer

    def _make_stage(self, index: int) -> RingStage:
        template, event_queue = self.template, self._event_queue
        roofline, pc = template.stages[index], self.pcs[index]
        requests, texts = SimStageRequests(), template.scenario.texts

        def token(request: int, position: int) -> int:
            seed = requests.seed_of(request)
            return (
                texts[seed % len(texts)].token_at(position) if texts else token_of(seed, position)
            )

        def forced(request: int, position: int) -> Sequence[int]:
            return (
                texts[requests.seed_of(request) % len(texts)].forced_at(position) if texts else ()
            )

        shape = template.stage_shape(index)
        executor = SimExecutor(
            event_queue,
            shape,
            roofline,
            template.zeros,
            pc,
            requests,
            token,
            forced,
            template.host_memory(index).block_s,
        )
        self._executors.append(executor)
        broken = partial(self._on_broken, index)
        link = self._make_link(index) if self._hops else None
        draft_roofline = template.scenario.draft_roofline if index == 0 else None
        drafter = (
            None if draft_roofline is None else SimDrafter(event_queue, draft_roofline, pc, texts)
        )
        environment = StageEnvironment(
            event_queue, requests, executor, self._create_receiver, broken, link, drafter
        )
        return build_ring(template.stage_plan(index, self._epoch), environment)

    def _make_link(self, index: int) -> LinkEnvironment:
        scenario = self.template.scenario
        packs = scenario.compression == "lossless"
        return LinkEnvironment(
            self._hops[index].open_channel,
            self._hops[index - 1],
            partial(self._on_broken, index),
            SimPacker(scenario.compression_ratio, self._event_queue.time) if packs else None,
            keep_warm=scenario.link_from(index).congestion == "cubic",
        )

    def _make_link_model(self, index: int) -> LinkModel:
        event_queue, link = self._event_queue, self.template.scenario.link_from(index)
        uplink = self.pcs[index].uplink
        if link.congestion == "none":
            return IdealLink(event_queue, uplink, link.latency, link.queue)
        return TcpLink(
            event_queue,
            uplink,
            self.pcs[(index + 1) % len(self.pcs)].uplink,
            link.latency,
            link.queue,
            lambda channel: create_controller(link.congestion, 2 * link.latency, channel),
        )

    def _make_hop(self, index: int) -> Hop:
        template = self.template
        handling = template.scenario.link_from(index).handling
        return Hop(index, self._event_queue, self._make_link_model(index), handling, template.zeros)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, at stage 0."""
        scheduler = self._stages[0].scheduler
        assert scheduler is not None
        return scheduler

    @property
    def links(self) -> tuple[LinkFacts, ...]:
        """Each stage's link to the next, as measured by the first stage."""
        return self._stages[0].ring.links

    def stage_stats(self, stage: int = 0) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges of a stage."""
        return self._stages[stage].collect_stats()

    @property
    def waited_s(self) -> list[float]:
        """Seconds for which each stage's steps waited for copies to or from host memory."""
        return [executor.waited_s for executor in self._executors]

    @property
    def transferred_s(self) -> list[float]:
        """Seconds in which each link transferred."""
        return [hop.link_model.busy_s for hop in self._hops]
