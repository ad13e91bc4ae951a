"""A pipeline of a fleet: forms rings, loses PCs, and recovers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from molink.errors import UsageError
from molink.ring.scheduler_bridge import EmissionReceiver
from molink.routing.base import PipelineLoad
from molink.scheduler.scheduler import Scheduler
from molink.sim.event_queue import Callback, EventQueue
from molink.sim.pc import SimPc
from molink.sim.ring import SimRing
from molink.sim.ring_template import RingTemplate
from molink.sim.scenario import Scenario

#: Measured seconds from the loss of a PC until the remaining ring accepts requests
#: (``docs/reliability.md``, kill -9 of another PC, median).
RECOVERY_S = 1.12


class RingTemplates:
    """Builds ring templates by number of stages; ``tenants`` stages share a PC's memory."""

    def __init__(self, scenario: Scenario, tenants: int) -> None:
        self.scenario = scenario
        self._tenants = tenants
        self._templates: dict[int, RingTemplate | None] = {
            0: None,
            scenario.stages: RingTemplate.from_scenario(scenario, tenants),
        }

    def for_stages(self, stages: int) -> RingTemplate | None:
        """Return the template for ``stages`` stages; ``None`` if they can't hold the model.

        Stages that are described one by one can't be fewer.
        """
        if self.scenario.devices and stages < self.scenario.stages:
            return None
        if stages not in self._templates:
            try:
                found = RingTemplate.from_scenario(
                    replace(self.scenario, stages=stages), self._tenants
                )
            except UsageError:
                found = None
            self._templates[stages] = found
        return self._templates[stages]


@dataclass(eq=False, slots=True)
class RingEpoch:
    """A ring from its formation to its end; it has ``num_live`` requests."""

    load: PipelineLoad
    ring: SimRing
    num_live: int = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.ring.scheduler

    def issue_batches(self) -> None:
        self.ring.issue_batches()

    def add_request(self) -> None:
        """Count a new request."""
        self.num_live += 1
        self.load.num_requests += 1
        self.load.total_sent += 1

    def remove_requests(self, count: int = 1) -> None:
        """Count ended requests."""
        self.num_live -= count
        self.load.num_requests -= count


class FleetContext(Protocol):
    """The part of a fleet that its pipelines use."""

    def create_receiver(self, scheduler: Scheduler) -> EmissionReceiver:
        """Create the receiver of a scheduler's emissions."""

    def on_ring_ended(self, epoch: RingEpoch, event_queue: EventQueue) -> None:
        """Handle the end of a ring, which has lost its requests."""

    def schedule_later(self, region: EventQueue, seconds: float, callback: Callback, /) -> None:
        """Schedule a common event ``seconds`` after the region's current time."""

    def on_ring_broken(self) -> None:
        """Handle the failure of a ring whose PCs are all present."""

    def on_pipelines_changed(self) -> None:
        """Handle that a pipeline began or ceased to accept requests."""


class FleetPipeline:
    """Keeps a pipeline running on the present PCs of ``pcs``, in order.

    It has as many stages as the scenario, or fewer if PCs are missing and the remaining ones can
    hold the model. After a larger ring has formed, the previous ring finishes its requests while
    the new one accepts requests.
    """

    def __init__(
        self,
        load: PipelineLoad,
        pcs: Sequence[SimPc],
        templates: RingTemplates,
        fleet: FleetContext,
        event_queue: EventQueue,
    ) -> None:
        self.load = load
        #: Numbers of rings formed and rings lost.
        self.num_formed = self.num_lost = 0
        #: The ring that accepts requests.
        self.epoch: RingEpoch | None = None
        self._pcs = pcs
        self._templates = templates
        self._fleet = fleet
        self._event_queue = event_queue
        #: Rings that finish their requests and accept no new ones.
        self._retiring: list[RingEpoch] = []
        #: Only the latest scheduled recovery counts.
        self._reform_number = 0

    def form_ring(self) -> None:
        """Form a ring of the present PCs unless the current ring is at least as large."""
        most = self._templates.scenario.stages
        present = [pc for pc in self._pcs if pc.is_present][:most]
        template = self._templates.for_stages(len(present))
        old = self.epoch
        if template is None or (old is not None and len(old.ring.pcs) >= len(present)):
            return
        self.num_formed += 1
        fleet = self._fleet
        ring = SimRing(
            self._event_queue,
            template,
            present,
            fleet.create_receiver,
            self._on_broken,
            self.num_formed,
        )
        self.epoch = RingEpoch(self.load, ring)
        ring.start()
        if old is not None:
            self._retire_ring(old)
        fleet.on_pipelines_changed()

    def on_pc_left(self, pc: SimPc) -> None:
        """End the rings of a PC that left."""
        for epoch in [self.epoch, *self._retiring]:
            if epoch is not None and pc in epoch.ring.pcs:
                self._lose_ring(epoch)

    def close_if_idle(self, epoch: RingEpoch) -> None:
        """Close a retiring ring after its last request."""
        if epoch.num_live == 0 and epoch in self._retiring:
            self._retiring.remove(epoch)
            self._event_queue.schedule_soon(epoch.ring.close)

    def _retire_ring(self, epoch: RingEpoch) -> None:
        self._retiring.append(epoch)
        self.close_if_idle(epoch)

    def _on_broken(self, stage: int, reason: str) -> None:
        """A stage failed; its rings end after the current event."""
        self._fleet.on_ring_broken()
        for epoch in [self.epoch, *self._retiring]:
            if epoch is not None:
                self._event_queue.schedule_soon(self._lose_ring, epoch)

    def _lose_ring(self, epoch: RingEpoch) -> None:
        if epoch in self._retiring:
            self._retiring.remove(epoch)
        elif epoch is self.epoch:
            self.epoch = None
            self.num_lost += 1
            self._reform_number += 1
            again = partial(self._reform_ring, self._reform_number)
            self._fleet.schedule_later(self._event_queue, RECOVERY_S, again)
            self._fleet.on_pipelines_changed()
        else:
            return
        epoch.ring.close()
        self._fleet.on_ring_ended(epoch, self._event_queue)

    def _reform_ring(self, due: int) -> None:
        if due == self._reform_number:
            self.form_ring()
