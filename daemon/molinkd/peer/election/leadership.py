"""Whom this peer follows, and the coordinator that runs here while it leads.

The shell of :mod:`molink.swarm.election.succession`: it asks other daemons over their control
sockets, starts and ends the coordinator's process, and tells its owner where to connect.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

import msgspec
import zmq.asyncio

from molink.errors import MolinkError, NotAuthorized, Unavailable, UsageError
from molink.facts.identity import peer_id
from molink.swarm.election.leading import (
    Answered,
    Ask,
    ConnectionLost,
    Event,
    Follow,
    Heard,
    Known,
    Lead,
    Led,
    NotLed,
    Raise,
    Resigned,
    Silent,
    StepDown,
    TimePassed,
)
from molink.swarm.election.succession import Succession
from molink.wire.messages.instructions import Member
from molink.wire.messages.leading import LeaderReply, LeaderRequest, LeaderView
from molinkd.peer.election.coordinator_child import (
    Announcement,
    CoordinatorProcess,
    Host,
    coordinator_process,
)
from molinkd.peer.election.leader_question import ask_leader
from molinkd.peer.election.replica_file import ReplicaFile
from molinkd.peer.launch import Announce, Trouble
from molinkd.peer.membership.addresses import from_here
from molinkd.peer.membership.membership import Membership

log = logging.getLogger(__name__)

TICK_S = 0.25
#: So many peers are asked at once.
_ASKED_AT_ONCE = 8


class DaemonHost(Host, Protocol):
    """What leading takes of a daemon."""

    @property
    def context(self) -> zmq.asyncio.Context: ...
    @property
    def announce(self) -> Announce: ...


class Leadership:
    """One daemon's part in who leads the swarm."""

    def __init__(
        self,
        host: DaemonHost,
        replica: ReplicaFile,
        membership: Membership | None,
        on_follow: Callable[[Membership], None] = lambda _: None,
        *,
        able: bool = True,
    ) -> None:
        """``membership`` is ``None`` to found a swarm. One that isn't ``able`` never leads.

        ``on_follow`` is told where the coordinator is, whenever that is another place.
        """
        self._host = host
        self.replica = replica
        self.membership = membership
        self.on_follow = on_follow
        self._able = able
        self._me = peer_id(host.keys.public)
        self._process: CoordinatorProcess | None = None
        #: Addresses of the coordinator here, as others reach it.
        self._announced: tuple[str, ...] = ()
        self._deeds: asyncio.Queue[Lead | StepDown | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Peers that are being asked.
        self._asking: set[str] = set()
        self._turns = asyncio.Semaphore(_ASKED_AT_ONCE)
        #: Who did not answer last time; and where all are asked beside what they have told.
        self._silent: set[str] = set()
        self._heard_at: tuple[str, ...] = ()
        self._loop = asyncio.get_running_loop()
        #: Done once this peer leads what it founds, or can't.
        self._begun: asyncio.Future[None] = self._loop.create_future()
        #: ``None`` until :meth:`start`.
        self._succession: Succession | None = None

    # --- life --------------------------------------------------------------------------------

    async def found(self) -> None:
        """Lead a new swarm, or one whose state nobody else has; returns once this peer does.

        Raises:
            UsageError: it can't; says why.
        """
        self.start()
        self._happened(TimePassed())
        await self._begun

    def serves(self, models: Sequence[str]) -> None:
        """Remember the swarm, and what ``up`` serves here, if it does."""
        if models:
            first, *more = models
            changed = msgspec.structs.replace(self.target, model=first, brought=tuple(more))
            self.membership = changed
        self.target.save(self._host.home.membership)

    @property
    def founds(self) -> bool:
        """Whether nobody else can lead, or is known to."""
        return self.membership is None or (self.membership.own and self.replica.held is None)

    def start(self) -> None:
        """Begin to look for the leader, if that hasn't begun; the session is about to."""
        if self._succession is not None:
            return
        membership = self.membership
        known = Known(self.replica.order or (self._me,), self.replica.version)
        self._succession = Succession(
            self._me,
            self._loop.time(),
            known=known,
            term=0 if membership is None else max(membership.term, known.replica[0]),
            leader=self._me if self.founds or membership is None else membership.leader,
            able=self._able,
        )
        self._spawn(self._act(), "molink-lead")
        self._spawn(self._ticks(), "molink-succession")

    def resign(self) -> None:
        """This daemon ends: others need not wait for it."""
        self._happened(Resigned())

    async def close(self) -> None:
        """End the coordinator, if it runs here."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._begun.cancel()
        await self._end_process()

    @property
    def leads(self) -> bool:
        """Whether the coordinator runs here."""
        return self._process is not None

    @property
    def coordinator(self) -> Announcement | None:
        """What the coordinator here says of itself; ``None`` while none runs here."""
        return None if self._process is None else self._process.announcement

    @property
    def target(self) -> Membership:
        """The swarm, and where its coordinator is as far as is known."""
        assert self.membership is not None
        return self.membership

    def where(self) -> tuple[str, tuple[str, ...]]:
        """The key of the coordinator, and the addresses at which others reach it."""
        target = self.target
        return target.coordinator_key, self._announced if self.leads else target.addresses

    # --- who has moved -----------------------------------------------------------------------

    @property
    def swarm(self) -> str:
        """The swarm's id."""
        return self.target.swarm

    @property
    def missing(self) -> bool:
        """Whether a member didn't answer when it was asked last, and this PC follows nobody."""
        follows = self._succession is None or self._succession.role == "following"
        return not follows and not self._silent.isdisjoint(self.replica.order)

    def heard_at(self, addresses: tuple[str, ...]) -> None:
        """Ask members there too from now on."""
        if addresses and addresses != self._heard_at:
            log.info("the swarm is heard at %s", ", ".join(addresses))
        self._heard_at = addresses or self._heard_at

    # --- what happens ------------------------------------------------------------------------

    def noted(self, term: int, leader: str) -> bool:
        """The coordinator has spoken; whether it is one to follow."""
        found = self._happened(Heard(term, leader))
        if found is None or term < found.term:
            return False
        self._remember(term=found.term, leader=found.leader)
        return True

    def cut(self) -> None:
        """The connection to the coordinator is lost."""
        self._happened(ConnectionLost())

    def shared(self, data: memoryview) -> None:
        """The coordinator shares its state."""
        assert self.membership is not None
        if self.replica.take(data, self.membership.swarm):
            self._happened(Known(self.replica.order, self.replica.version))

    def answer(self, peer: str, request: LeaderRequest) -> LeaderReply:
        """A peer asks whom this one follows, and says whom it follows itself.

        Raises:
            Unavailable: this daemon is still starting.
            NotAuthorized: the peer is of another swarm.
        """
        if request.swarm != self.target.swarm:
            raise NotAuthorized(f"this PC is not of swarm {request.swarm}")
        found = self._happened(Answered(peer, request.view))
        if found is None:
            raise Unavailable("this daemon is still starting")
        return LeaderReply(ref=request.ref, view=found.view(self._loop.time()))

    def _happened(self, event: Event) -> Succession | None:
        """Decide, and begin to carry it out; nothing happens before :meth:`start`."""
        succession = self._succession
        if succession is None:
            return None
        role = succession.role
        for decision in succession.handle(event, self._loop.time()):
            match decision:
                case Ask(peer):
                    self._ask_once(peer, succession)
                case Follow():
                    self._follow(decision)
                case Raise(term):
                    if self._process is not None:
                        self._process.raise_term(term)
                    self._remember(term=term)
                case Lead() | StepDown():
                    if self.leads:
                        log.warning("the coordinator here is ended: %s", succession.story[-1])
                    self._deeds.put_nowait(decision)
        if succession.role != role:
            log.info("%s", succession.story[-1])
        return succession

    def _follow(self, decision: Follow) -> None:
        addresses = decision.addresses
        if decision.leader == self._me and self._process is not None:
            addresses = (f"{from_here(self._host.settings.host)}:{self._process.port}",)
        self._remember(
            term=decision.term,
            leader=decision.leader,
            coordinator_key=decision.coordinator_key,
            addresses=addresses,
        )
        if self.membership is not None:
            self.on_follow(self.membership)

    def _remember(self, **changes: object) -> None:
        if self.membership is None:
            return
        changed = msgspec.structs.replace(self.membership, **changes)
        if changed != self.membership:
            self.membership = changed
            try:
                changed.save(self._host.home.membership)
            except OSError as error:
                log.warning("can't remember where the coordinator is: %s", error)

    # --- asking ------------------------------------------------------------------------------

    def _ask_once(self, peer: str, succession: Succession) -> None:
        """Ask, unless that is under way: questions of others must not make ever more of ours."""
        if peer not in self._asking:
            self._asking.add(peer)
            self._spawn(self._ask(peer, succession), f"molink-ask-{peer}")

    async def _ask(self, peer: str, succession: Succession) -> None:
        async with self._turns:
            if not succession.wants(peer):
                self._asking.discard(peer)
                return
            answer = await self._answer_of(peer, succession)
        self._asking.discard(peer)
        if answer is None:
            self._silent.add(peer)
        else:
            self._silent.discard(peer)
        self._happened(Silent(peer) if answer is None else Answered(peer, answer))

    async def _answer_of(self, peer: str, succession: Succession) -> LeaderView | None:
        member = self._member(peer)
        if member is None or self.membership is None:
            return None
        view = succession.view(self._loop.time())
        request = LeaderRequest(ref=0, swarm=self.membership.swarm, view=view)
        return await ask_leader(self._host.context, self._host.keys, member, request)

    def _member(self, peer: str) -> Member | None:
        held = self.replica.held
        for one in () if held is None else held.members:
            if one.peer == peer and one.announced is not None and one.announced.addresses:
                addresses = dict.fromkeys((*one.announced.addresses, *self._heard_at))
                return msgspec.structs.replace(one.announced, addresses=tuple(addresses))
        return None

    # --- leading -----------------------------------------------------------------------------

    async def _act(self) -> None:
        """Start and end the coordinator as decided, one after the other."""
        while True:
            deed = await self._deeds.get()
            await self._end_process()
            if isinstance(deed, Lead):
                await self._lead(deed)

    async def _lead(self, deed: Lead) -> None:
        held = self.replica.path if self.replica.held is not None else None
        process = coordinator_process(
            self._host, self.membership, held, deed, self._me, self._failing
        )
        try:
            announcement = await process.start()
        except MolinkError as error:
            await process.close()
            if self.founds and not self._begun.done():
                self._begun.set_exception(UsageError(str(error)))
                return
            self._happened(NotLed())
            self._host.announce(Trouble(text=str(error)))
            return
        self._process, self._announced = process, announcement.addresses
        if announcement.restored:
            self._host.announce(Trouble(text=announcement.restored))
        if self.membership is None:
            self.membership = self._founded(announcement)
        self._happened(
            Led(announcement.term, announcement.public_key, tuple(announcement.addresses))
        )
        if not self._begun.done():
            self._begun.set_result(None)

    def _founded(self, announcement: Announcement) -> Membership:
        return Membership(
            swarm=announcement.swarm,
            coordinator_key=announcement.public_key,
            addresses=tuple(announcement.addresses),
            own=True,
            leader=self._me,
        )

    def _failing(self) -> None:
        self._happened(NotLed())
        self._host.announce(
            Trouble(text="the coordinator ends again and again here: another PC is to run it")
        )

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._happened(TimePassed())

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
