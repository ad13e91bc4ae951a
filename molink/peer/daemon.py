"""The daemon of one PC: puts its parts together, runs them, and ends them in order."""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import zmq.asyncio

import molink
from molink.api.backend import ServedModel
from molink.errors import MolinkError, UsageError
from molink.model.source import DEMO_MODEL, demo_model
from molink.peer.addresses import advertised, from_here
from molink.peer.assignments import Assignments
from molink.peer.catalogue import Catalogue
from molink.peer.device import Measured, measure_device
from molink.peer.endpoint import Endpoint
from molink.peer.founder import Founder
from molink.peer.heads import Heads
from molink.peer.home import Home, HomeLock
from molink.peer.launch import (
    Announce,
    Launch,
    Listening,
    ModelReady,
    StageNow,
    Trouble,
)
from molink.peer.library import Library
from molink.peer.membership import Membership, join, parse_token, read_membership
from molink.peer.requests import Requests
from molink.peer.roster import Roster
from molink.peer.runfile import RunFile
from molink.peer.service import Service, UserCommands
from molink.peer.session import Session
from molink.peer.settings import port_range
from molink.peer.sources import Sources
from molink.peer.status import local_status
from molink.peer.store import Store
from molink.peer.stream import StreamLimits
from molink.wire.codec import control_codec
from molink.wire.control import (
    Assign,
    ControlMessage,
    Device,
    Form,
    Invite,
    InviteRequest,
    LeaveRequest,
    Member,
    MemberGone,
    PeerReport,
    Route,
    RouteGone,
    StatusRequest,
    Unassign,
)
from molink.wire.data import DataMessage
from molink.wire.keys import peer_id
from molink.wire.pipe import MemberKey
from molink.wire.server import Server
from molink.wire.zap import Gatekeeper

log = logging.getLogger(__name__)

#: Until a new session has named all members, in seconds.
SWEEP_S = 5.0


class Daemon:
    """One run of a peer, from taking its home's lock to letting go of it."""

    def __init__(self, launch: Launch, announce: Announce) -> None:
        self._launch = launch
        self._announce = announce
        self._settings = launch.settings
        self._home = Home(Path(launch.home))
        self._stop = asyncio.Event()
        self._leaving = False
        self._ready: dict[str, bool] = {}
        self._stages_text = ""

    def stop(self) -> None:
        """End the run soon; from the daemon's own loop."""
        self._stop.set()

    async def run(self) -> None:
        """Run until :meth:`stop`, or until cancelled; everything it started has then ended.

        Raises:
            MolinkError: it can't start.
        """
        lock = HomeLock(self._home.create())
        lock.acquire()
        try:
            async with AsyncExitStack() as stack:
                await self._start(stack)
                await self._stop.wait()
            if self._leaving:
                self._home.membership.unlink(missing_ok=True)
        finally:
            lock.release()

    # --- start -------------------------------------------------------------------------------

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        self._keys = self._home.keys()
        self._me = peer_id(self._keys.public)
        self._library = Library()
        founder = Founder(self._launch, self._home, self._keys, self._library, self._announce)
        await founder.find_model()
        measuring = asyncio.create_task(self._measure())
        stack.push_async_callback(_cancel, measuring)
        self._context = zmq.asyncio.Context()
        stack.callback(self._context.destroy, linger=0)
        self._open_control(stack)
        if self._launch.role == "up":
            membership = await founder.start_coordinator(stack)
        else:
            membership = await self._member()
        membership.save(self._home.membership)
        self._membership = membership
        self._measured = await measuring
        self._build(stack)
        await self._open_endpoint(stack)
        self._assignments.measured(self._measured)
        self._session.start()
        stack.push_async_callback(self._session.close)
        self._announce(
            Listening(
                name=settings.name,
                swarm=membership.swarm,
                endpoint=self._endpoint.url,
                control_port=self._server.port,
                pid=os.getpid(),
            )
        )
        serving = asyncio.create_task(founder.serve(self._session))
        stack.push_async_callback(_cancel, serving)

    async def _measure(self) -> Measured:
        if self._settings.stage == "none":
            return Measured(Device(kind="cpu", name="not used", memory=0), bf16=False)
        return await measure_device(self._settings, self._home.device)

    async def _member(self) -> Membership:
        """The swarm to return to, or a new membership by the token."""
        known = read_membership(self._home.membership)
        if self._launch.token is None:
            if known is None:
                raise UsageError(
                    "this PC is in no swarm: paste the token that `molink up` printed, as in "
                    "`molink join molink-…`"
                )
            if known.own:
                raise UsageError("this PC runs its own swarm: start it with `molink up`")
            return known
        token = parse_token(self._launch.token)
        if known is not None and known.coordinator_key == token.coordinator_key:
            return msgspec.structs.replace(known, addresses=token.addresses)
        if known is not None:
            raise UsageError(
                f"this PC is a member of swarm {known.swarm}. Run `molink leave` first, or give "
                "another state folder with --home."
            )
        return await join(self._context, self._keys, token, self._settings.name)

    def _open_control(self, stack: AsyncExitStack) -> None:
        self._gatekeeper = Gatekeeper(self._context)
        self._gatekeeper.allow(self._keys.public)
        self._gatekeeper.start()
        stack.callback(self._gatekeeper.close)
        commands = UserCommands(self._status, self._invite, self._shutdown)
        service = Service(self._me, self._library, commands)
        self._server: Server[ControlMessage] = Server(
            self._context,
            self._keys,
            control_codec(),
            self._gatekeeper,
            service.handle,
            permits=service.permits,
        )
        service.send = self._server.send
        ports = port_range(self._settings.control_port)
        self._server.bind(self._settings.host, ports, "--control-port")
        stack.push_async_callback(self._server.close)

    def _build(self, stack: AsyncExitStack) -> None:
        """Make all parts that talk to the swarm, in the order in which they lean on each other."""
        settings, keys = self._settings, self._keys
        self._roster = Roster(MemberKey(peer=self._me, public_key=keys.public))
        self._roster.on_member = self._member_came
        self._roster.on_gone = self._member_went
        bundled = Library()
        try:
            bundled.add(DEMO_MODEL, demo_model().path)
        except MolinkError as error:
            log.info("%s", error)
        connect = Sources(self._context, keys, self._roster).connect
        self._store = Store(self._home.models, self._me, self._library, connect, bundled)
        self._session = Session(
            self._context,
            keys,
            self._membership,
            self._report,
            self._take,
            self._welcomed,
        )
        self._assignments = Assignments(
            settings,
            keys,
            self._store,
            self._roster,
            self._home.logs,
            self._session.tell,
            self._stages_changed,
        )
        stack.push_async_callback(self._assignments.close)
        self._heads = Heads(self._context, keys, self._heads_changed, self._head_said)
        stack.push_async_callback(self._heads.close)
        limits = StreamLimits(hold_s=settings.hold)
        self._requests = Requests(self._heads, limits, self._metrics)
        stack.callback(self._requests.close)
        self._catalogue = Catalogue(self._store, self._models_changed)
        stack.push_async_callback(self._catalogue.close)

    async def _open_endpoint(self, stack: AsyncExitStack) -> None:
        self._endpoint = Endpoint(self._settings, self._requests)
        await self._endpoint.start()
        stack.push_async_callback(self._endpoint.close)
        here = from_here(self._settings.host)
        note = RunFile.of_this_process(self._server.port, self._endpoint.url, control_host=here)
        note.save(self._home.run_file)
        stack.callback(self._home.run_file.unlink, missing_ok=True)

    # --- the coordinator ---------------------------------------------------------------------

    def _report(self) -> PeerReport:
        settings = self._settings
        return PeerReport(
            name=settings.name,
            version=molink.__version__,
            addresses=advertised(settings.host, settings.advertise),
            control_port=self._server.port,
            endpoint=self._endpoint.url,
            daemon_pid=os.getpid(),
            stage=settings.stage,
            device=self._measured.device,
            models=self._library.names,
            workers=self._assignments.states(),
        )

    def _welcomed(self) -> None:
        self._roster.welcomed()
        asyncio.get_running_loop().call_later(SWEEP_S, self._roster.sweep)
        self._assignments.repeat()

    def _take(self, message: ControlMessage) -> None:
        match message:
            case Member():
                if not self._roster.add(message):
                    log.warning("the coordinator announces a member by another's id")
            case MemberGone():
                self._roster.remove(message.peer)
            case Assign() | Form() | Unassign():
                self._assignments.handle(message)
            case Route():
                self._heads.update(message)
                self._catalogue.update(message)
            case RouteGone():
                self._heads.remove(message.pipeline)
                self._catalogue.remove(message.pipeline)
            case _:
                log.debug("unexpected %s of the coordinator", type(message).__name__)

    def _member_came(self, member: Member) -> None:
        self._gatekeeper.allow(member.public_key)
        self._assignments.members_changed()

    def _member_went(self, peer: str) -> None:
        self._server.deny(peer)
        self._assignments.members_changed()

    # --- what changes here -------------------------------------------------------------------

    def _stages_changed(self) -> None:
        self._session.report_now()
        text = self._assignments.describe()
        if text != self._stages_text:
            self._stages_text = text
            self._announce(StageNow(text=text))

    def _models_changed(self, models: Sequence[ServedModel]) -> None:
        self._requests.serve(models)
        for model in models:
            self._announce_ready(model.name)

    def _heads_changed(self, model: str) -> None:
        self._requests.heads_changed(model)
        self._announce_ready(model)

    def _announce_ready(self, model: str) -> None:
        ready = self._requests.ready(model)
        if ready != self._ready.get(model, False):
            self._ready[model] = ready
            self._announce(ModelReady(model=model, ready=ready))

    def _head_said(self, pipeline: str, message: DataMessage) -> None:
        self._requests.message(pipeline, message)

    def _metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        counters, gauges = self._assignments.supervisor.metrics()
        control = self._server.counters
        counters["daemon_bytes_fetched"] = float(self._store.received)
        counters["control_strangers_refused"] = float(control.strangers)
        counters["control_messages_malformed"] = float(control.malformed)
        counters["control_messages_forbidden"] = float(control.forbidden)
        return counters, gauges

    # --- the command line --------------------------------------------------------------------

    async def _status(self) -> bytes:
        try:
            _, text = await self._session.request_payload(StatusRequest(ref=0), timeout=3.0)
            return text
        except MolinkError as error:
            reason = self._session.failure or str(error)
        return local_status(self._membership, self._me, self._report(), self._heads.routes, reason)

    async def _invite(self, ttl: float) -> str:
        reply = await self._session.request(InviteRequest(ref=0, ttl=ttl))
        assert isinstance(reply, Invite)
        return reply.token

    async def _shutdown(self, leave: bool) -> None:
        if leave:
            try:
                await self._session.request(LeaveRequest(ref=0), timeout=5.0)
            except MolinkError as error:
                self._announce(Trouble(text=f"the coordinator was not told: {error}"))
            self._leaving = True
        # The answer has to go out before the socket is closed.
        asyncio.get_running_loop().call_later(0.2, self._stop.set)


async def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
