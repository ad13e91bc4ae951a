"""The daemon of one PC: puts its parts together, runs them, and ends them in order."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import zmq.asyncio

from molink.errors import MolinkError, ShutOut, TokenError, Unavailable, UsageError
from molink.facts.device import Device
from molink.files import patiently
from molink.swarm.membership.offenders import Offenders
from molink.swarm.membership.token import JoinToken
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.leading import LeaderReply, LeaderRequest
from molink.wire.messages.requests import Applied, ApplyFile, Bringing, ModelEntry
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.peer.agent.device_probe import Measured, measure_device
from molinkd.peer.agent.devices import FurtherDevices, own_settings
from molinkd.peer.agent.draft_model import DraftModel
from molinkd.peer.artifacts.applier import Applier
from molinkd.peer.artifacts.bringer import Bringer
from molinkd.peer.artifacts.founder import Founder
from molinkd.peer.artifacts.hashing import Hasher, in_thread
from molinkd.peer.artifacts.in_shards import kept_model
from molinkd.peer.artifacts.library import Library
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.transfers import Transfers
from molinkd.peer.election.leadership import Leadership
from molinkd.peer.election.replica_file import ReplicaFile
from molinkd.peer.frontend.endpoint import Endpoint
from molinkd.peer.home import Home, HomeLock
from molinkd.peer.launch import Announce, AnyEvent, Launch, Listening, Transferring, Trouble
from molinkd.peer.membership.addresses import from_here
from molinkd.peer.membership.discovery import Announcer, Lookout
from molinkd.peer.membership.membership import Membership, ask_again, choose, join, read_membership
from molinkd.peer.node import Node
from molinkd.peer.resources import Resources
from molinkd.peer.runfile import RunFile
from molinkd.peer.service import AboutLeader, Service, UserCommands

#: Until the answer to an order to stop is out, in seconds.
_LAST_WORDS_S = 0.2


class Daemon:
    """One run of a peer, from taking its home's lock to letting go of it."""

    def __init__(self, launch: Launch, announce: Announce) -> None:
        #: Those of the whole PC.
        self._all = launch.settings
        self._settings = own_settings(launch.settings)
        self._launch = msgspec.structs.replace(launch, settings=self._settings)
        self._say = announce
        self._home = Home(Path(launch.home))
        self._stop = asyncio.Event()
        self._leaving = False
        #: Why the swarm doesn't have this PC.
        self._shut_out: ShutOut | UsageError | None = None
        self._transfers = Transfers()
        self._bringer: Bringer | None = None
        self._applier: Applier | None = None
        self._node: Node | None = None
        self._devices: FurtherDevices | None = None
        self._leadership: Leadership | None = None
        self._draft_model: DraftModel | None = None

    def _announce(self, event: AnyEvent) -> None:
        """Tell whoever started this; that it can't be written (a full disk) ends nothing."""
        with contextlib.suppress(OSError):
            self._say(event)

    def stop(self) -> None:
        """End the run soon; from the daemon's own loop."""
        self._stop.set()

    async def run(self) -> None:
        """Run until :meth:`stop`, or until cancelled; everything it started has then ended.

        Raises:
            MolinkError: it can't start.
            ShutOut: this PC was revoked.
            UsageError: another PC runs with a copy of this state folder.
        """
        lock = HomeLock(self._home.create())
        lock.acquire()
        try:
            async with AsyncExitStack() as stack:
                await self._start(stack)
                await self._stop.wait()
            if self._leaving:
                patiently(partial(self._home.membership.unlink, missing_ok=True))
        finally:
            lock.release()
        if isinstance(self._shut_out, ShutOut):
            known = read_membership(self._home.membership)
            if known is not None:
                msgspec.structs.replace(known, shut_out=True).save(self._home.membership)
        if self._shut_out is not None:
            raise self._shut_out

    async def _start(self, stack: AsyncExitStack) -> None:
        known = read_membership(self._home.membership)
        chosen = (
            choose(self._home, known, self._launch.token) if self._launch.role == "join" else None
        )
        library = Library(Hasher(self._home.hashes))
        keys = self._home.keys()
        founder = self._founder(self._launch, keys, library)
        await self._find(founder)
        measuring = asyncio.create_task(self._measure())
        stack.push_async_callback(_cancel, measuring)
        hashing = asyncio.create_task(founder.hash_model())
        stack.push_async_callback(_cancel, hashing)
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        resources = self._resources(stack, context, library)
        if chosen is None:
            membership = known
        elif isinstance(chosen, Membership):
            membership = await self._return(context, keys, chosen)
        else:
            membership = await self._join(context, keys, chosen, known)
        swarm = membership.swarm if membership is not None else None
        replica = ReplicaFile(self._home.replica, swarm)
        leadership = self._leadership = Leadership(
            resources, replica, membership, able=not self._launch.pc
        )
        stack.push_async_callback(leadership.close)
        if leadership.founds:
            await leadership.found()
        announcer = Announcer(self._settings, lambda: leadership.coordinator)
        stack.push_async_callback(announcer.close)
        announcer.start()
        lookout = Lookout(self._settings, leadership)
        stack.push_async_callback(lookout.close)
        lookout.start()
        leadership.serves([founder.model, *founder.brought] if founder.model else [])
        measured = await measuring
        await hashing
        self._bringer = self._make_bringer(keys, library, leadership)
        stack.push_async_callback(self._bringer.close)
        self._applier = self._make_applier(keys, library, leadership)
        stack.push_async_callback(self._applier.close)
        node = await self._enter(stack, resources, leadership, measured)
        assert self._devices is not None
        self._devices.start(measured, lambda: leadership.target, node.session.request)
        offering = self._offer_again(founder.brought, keys, library, node)
        for work in (founder.serve(node.session), founder.watch(), offering):
            stack.push_async_callback(_cancel, asyncio.create_task(work))

    def _founder(self, launch: Launch, keys: KeyPair, library: Library) -> Founder:
        return Founder(launch, self._home, keys, library, self._announce, self._transfers)

    async def _find(self, founder: Founder) -> None:
        """Have the founder's model here, and tell meanwhile how far it is."""

        def tell() -> None:
            self._announce(Transferring(transfers=self._transfers.shown()))

        telling = asyncio.create_task(self._transfers.watch(tell))
        try:
            await founder.find_model()
            if self._settings.draft_model:
                await self._find_draft_model(self._settings.draft_model, founder.path)
        finally:
            await _cancel(telling)

    async def _find_draft_model(self, name: str, served: Path | None) -> None:
        """Have it here, and know that it fits what is ``served``, before anything starts."""
        progress, into = Progress(source="hub"), self._home.unpacked

        def find(stop: threading.Event) -> DraftModel:
            model = DraftModel.find(name, into, progress, stop)
            if served is not None:
                model.check(served)
            return model

        with self._transfers.under_way(name, progress):
            self._draft_model = await in_thread(find)

    def _make_bringer(self, keys: KeyPair, library: Library, leadership: Leadership) -> Bringer:
        def begin(model: str) -> Founder:
            return self._founder(msgspec.structs.replace(self._launch, model=model), keys, library)

        def served(model: str) -> None:
            if self._launch.role == "up":
                leadership.serves([model])  # so will it be when it is started again

        return Bringer(begin, self._relay, served)

    async def _return(
        self, context: zmq.asyncio.Context, keys: KeyPair, known: Membership
    ) -> Membership:
        """Back to the swarm joined before; one that has shut this PC out is asked first."""
        if not known.shut_out:
            return known
        try:
            return await ask_again(context, keys, known)
        except ShutOut as error:
            raise ShutOut(f"{self._shut_out_of(known.swarm)} (asked now: {error})") from error

    def _make_applier(self, keys: KeyPair, library: Library, leadership: Leadership) -> Applier:
        def begin(entry: ModelEntry) -> Founder:
            settings = msgspec.structs.replace(
                self._settings, dtype=entry.dtype, quantize=entry.quantize
            )
            launch = msgspec.structs.replace(self._launch, model=entry.source, settings=settings)
            return self._founder(launch, keys, library)

        async def ask(message: ControlMessage, payload: bytes) -> tuple[ControlMessage, bytes]:
            return await self._running().relay(message, payload)

        def applied(models: Sequence[str]) -> None:
            if self._launch.role == "up":
                leadership.serves(models)

        def kept(model: str) -> bool:
            return kept_model(self._home.models, model) is not None

        return Applier(begin, ask, applied, kept)

    async def _offer_again(
        self, models: Sequence[str], keys: KeyPair, library: Library, node: Node
    ) -> None:
        """Have the files here that others may want to fetch, of models that were applied."""
        for model in models:
            founder = self._founder(
                msgspec.structs.replace(self._launch, model=model), keys, library
            )
            try:
                await founder.find_model()
                await founder.hash_model()
            except MolinkError as error:
                self._announce(Trouble(text=str(error)))
            node.session.report_now()

    async def _join(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        token: JoinToken,
        known: Membership | None,
    ) -> Membership:
        """Join by the token; a PC that was a member before goes on without it if need be."""
        try:
            return await join(context, keys, token, self._settings.name)
        except (TokenError, Unavailable) as error:
            if known is None or known.shut_out:
                raise
            why = "this PC has joined the swarm before, so it goes on without the token"
            self._announce(Trouble(text=f"{why}: {error}"))
            return msgspec.structs.replace(known, addresses=token.addresses)

    async def _measure(self) -> Measured:
        if self._settings.stage == "none":
            return Measured(Device(kind="cpu", name="not used", memory=0), bf16=False)
        measured = await measure_device(self._settings, self._home.device)
        draft = self._draft_model
        return measured if draft is None else draft.beside(measured, self._settings)

    def _resources(
        self, stack: AsyncExitStack, context: zmq.asyncio.Context, library: Library
    ) -> Resources:
        """Open the control socket."""
        settings, keys = self._settings, self._home.keys()
        gatekeeper = Gatekeeper(context)
        me = gatekeeper.allow(keys.public)
        gatekeeper.start()
        stack.callback(gatekeeper.close)
        commands = UserCommands(
            self._status, self._relay, self._shutdown, self._drain, self._bring, self._apply
        )
        offenders = Offenders()
        service = Service(me, library, commands, AboutLeader(self._answer, self._where))
        server: Server[ControlMessage] = Server(
            context,
            keys,
            control_codec(),
            gatekeeper,
            service.handle,
            permits=service.permits,
            on_blocked=partial(offenders.blocked, "this PC's control socket"),
        )
        service.send = server.send
        server.bind(settings.host, settings.tries("control_port"), "--control-port")
        stack.push_async_callback(server.close)
        return Resources(
            settings,
            self._home,
            keys,
            context,
            gatekeeper,
            server,
            library,
            offenders,
            self._announce,
            self._transfers,
            self._launch.pc,
        )

    async def _enter(
        self,
        stack: AsyncExitStack,
        resources: Resources,
        leadership: Leadership,
        measured: Measured,
    ) -> Node:
        """Open the endpoint and begin the session with the coordinator."""
        url, swarm = "", leadership.target.swarm
        node = Node(
            resources, leadership, lambda: url, partial(self._revoked, swarm), self._is_twin
        )
        stack.push_async_callback(node.close)
        devices = self._devices = FurtherDevices(
            self._all, self._home, resources.me, resources.context, self._announce
        )
        # All say goodbye at once, so that the others change their ring once.
        stack.push_async_callback(lambda: asyncio.gather(node.goodbye(), devices.close()))
        if not self._launch.pc:
            endpoint = Endpoint(self._settings, node.requests)
            await endpoint.start()
            stack.push_async_callback(endpoint.close)  # answers end before the others are told
            url = endpoint.url
        node.start(measured)
        self._node = node
        here = from_here(self._settings.host)
        note = RunFile.of_this_process(resources.server.port, url, control_host=here)
        note.save(self._home.run_file)
        stack.callback(patiently, partial(self._home.run_file.unlink, missing_ok=True))
        self._announce(
            Listening(
                name=self._settings.name,
                swarm=swarm,
                endpoint=url,
                control_port=resources.server.port,
                pid=os.getpid(),
            )
        )
        return node

    # --- other peers ---------------------------------------------------------------------------

    def _answer(self, peer: str, request: LeaderRequest) -> LeaderReply:
        if self._leadership is None:
            raise Unavailable("this daemon is still starting")
        return self._leadership.answer(peer, request)

    def _where(self) -> tuple[str, tuple[str, ...]]:
        if self._leadership is None or self._leadership.membership is None:
            raise Unavailable("this daemon is still starting")
        return self._leadership.where()

    # --- the command line --------------------------------------------------------------------

    async def _status(self, outlook: bool) -> bytes:
        return await self._running().status(outlook)

    async def _relay(self, message: ControlMessage) -> tuple[ControlMessage, bytes]:
        return await self._running().relay(message)

    async def _bring(self, model: str) -> Bringing:
        self._running()
        assert self._bringer is not None
        return await self._bringer.ask(model)

    async def _apply(self, order: ApplyFile) -> tuple[Bringing | Applied, bytes]:
        self._running()
        assert self._applier is not None
        return await self._applier.apply(order)

    async def _shutdown(self, leave: bool) -> None:
        if leave:
            node = self._running()
            if self._devices is not None:
                await self._devices.leave()
            await node.leave()
            self._leaving = True
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._stop.set)

    def _drain(self, drain: bool, device: str) -> None:
        node = self._running()
        own = device == node.device
        if self._devices is not None and not own:
            self._devices.drain(drain, device)
        if own or not device:
            node.drain(drain)

    def _revoked(self, swarm: str) -> None:
        self._shut_out = ShutOut(self._shut_out_of(swarm))
        self._stop.set()

    def _shut_out_of(self, swarm: str) -> str:
        return (
            f"this PC was shut out of swarm {swarm}. `molink un-revoke {self._settings.name}` on "
            f"the swarm's first PC lets it in again, then start it with "
            f"{self._home.typed('join')}; {self._home.typed('leave')} here forgets the swarm"
        )

    def _is_twin(self) -> None:
        self._shut_out = UsageError(
            f"another PC with the key of this one is in the swarm, and runs: the state folder "
            f"{self._home.root} is a copy of that PC's. Delete peer.key and swarm.json in it, then "
            f"run {self._home.typed('join')}: this PC becomes a member of its own"
        )
        self._stop.set()

    def _running(self) -> Node:
        if self._node is None:
            raise Unavailable("the daemon is still starting; try again in a moment")
        return self._node


async def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
