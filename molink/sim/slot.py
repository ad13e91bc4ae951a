"""One of many pipelines: it is formed, loses a PC, is formed anew, and grows again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from molink.errors import UsageError
from molink.ring.ends import FrontDesk
from molink.routing.base import PipelineLoad
from molink.scheduler.head import Head
from molink.sim.agenda import Action, Agenda
from molink.sim.blueprint import Blueprint
from molink.sim.pc import Pc
from molink.sim.ring import SimRing
from molink.sim.scenario import Scenario

#: Seconds from the loss of a PC until the ring of those that are left takes requests: as measured
#: (``docs/reliability.md``, kill -9 of another PC, median).
RECOVERY = 1.12


class Blueprints:
    """Of one scenario, by the number of stages; ``tenants`` stages share a PC's memory."""

    def __init__(self, scenario: Scenario, tenants: int) -> None:
        """Raises as :meth:`Blueprint.of`: all stages together have to do."""
        self.scenario = scenario
        self._tenants = tenants
        self._known: dict[int, Blueprint | None] = {
            0: None,
            scenario.stages: Blueprint.of(scenario, tenants),
        }

    def of(self, stages: int) -> Blueprint | None:
        """That of so many stages; ``None`` if they can't hold the model."""
        if stages not in self._known:
            try:
                found = Blueprint.of(replace(self.scenario, stages=stages), self._tenants)
            except UsageError:
                found = None
            self._known[stages] = found
        return self._known[stages]


@dataclass(eq=False, slots=True)
class Epoch:
    """A ring of a pipeline from its forming to its end; ``live`` requests are served there."""

    load: PipelineLoad
    ring: SimRing
    live: int = 0

    @property
    def head(self) -> Head:
        """The ring's."""
        return self.ring.head

    def pump(self) -> None:
        """The head has something new."""
        self.ring.pump()

    def begun(self) -> None:
        """It has one request more."""
        self.live += 1
        self.load.requests += 1
        self.load.sent += 1

    def over(self, count: int = 1) -> None:
        """It has ``count`` less."""
        self.live -= count
        self.load.requests -= count


class Neighbours(Protocol):
    """What a pipeline asks of those around it, and tells them."""

    def desk(self, head: Head) -> FrontDesk:
        """The front desk of a head."""

    def ended(self, epoch: Epoch, agenda: Agenda) -> None:
        """A ring is gone, and what it served with it."""

    def later(self, region: Agenda, seconds: float, action: Action, /) -> None:
        """Have something happen that concerns all, so many seconds after what happens now."""

    def broke(self) -> None:
        """A ring can't go on though all of its PCs are there."""

    def changed(self) -> None:
        """A pipeline takes requests now, or doesn't any more."""


class Slot:
    """Keeps one pipeline going over those of its ``pcs`` that are there, in their order.

    It has as many stages as the scenario, or as there are PCs if the model fits into these. What a
    ring serves ends there while the next one, of more PCs, takes the new requests.
    """

    def __init__(
        self,
        load: PipelineLoad,
        pcs: Sequence[Pc],
        blueprints: Blueprints,
        around: Neighbours,
        agenda: Agenda,
    ) -> None:
        """``agenda`` has what happens in its rings."""
        self.load = load
        #: Rings that there were, and those that were lost.
        self.formed = self.lost = 0
        #: Takes requests; ``None`` while none can.
        self.epoch: Epoch | None = None
        self._pcs = pcs
        self._blueprints = blueprints
        self._around = around
        self._agenda = agenda
        #: Rings that take no more requests.
        self._retiring: list[Epoch] = []
        #: Only the last of the appointments to form it counts.
        self._due = 0

    def form(self) -> None:
        """Have the ring of those who are there, unless there is one of so many stages."""
        most = self._blueprints.scenario.stages
        there = [pc for pc in self._pcs if pc.there][:most]
        blueprint = self._blueprints.of(len(there))
        old = self.epoch
        if blueprint is None or (old is not None and len(old.ring.pcs) >= len(there)):
            return
        self.formed += 1
        around = self._around
        ring = SimRing(self._agenda, blueprint, there, around.desk, self._broken, self.formed)
        self.epoch = Epoch(self.load, ring)
        ring.start()
        if old is not None:
            self._retire(old)
        around.changed()

    def gone(self, pc: Pc) -> None:
        """A PC is not there any more."""
        for epoch in [self.epoch, *self._retiring]:
            if epoch is not None and pc in epoch.ring.pcs:
                self._lose(epoch)

    def rest(self, epoch: Epoch) -> None:
        """A request that a ring served is over."""
        if epoch.live == 0 and epoch in self._retiring:
            self._retiring.remove(epoch)
            self._agenda.soon(epoch.ring.close)

    def _retire(self, epoch: Epoch) -> None:
        self._retiring.append(epoch)
        self.rest(epoch)

    def _broken(self, stage: int, reason: str) -> None:
        """A stage can't go on; it says so in the midst of what it does."""
        self._around.broke()
        for epoch in [self.epoch, *self._retiring]:
            if epoch is not None:
                self._agenda.soon(self._lose, epoch)

    def _lose(self, epoch: Epoch) -> None:
        if epoch in self._retiring:
            self._retiring.remove(epoch)
        elif epoch is self.epoch:
            self.epoch = None
            self.lost += 1
            self._due += 1
            again = partial(self._form_again, self._due)
            self._around.later(self._agenda, RECOVERY, again)
            self._around.changed()
        else:
            return
        epoch.ring.close()
        self._around.ended(epoch, self._agenda)

    def _form_again(self, due: int) -> None:
        if due == self._due:
            self.form()
