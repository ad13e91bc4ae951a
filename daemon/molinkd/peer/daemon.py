"""The daemon of one PC: creates its parts, runs them, and stops them in order."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from molink.errors import MolinkError, PeerBanned, TokenError, Unavailable, UsageError
from molink.facts.device import Device
from molink.facts.identity import derive_peer_id
from molink.files import retry_while_busy
from molink.swarm.membership.banned_peers import BannedPeers
from molink.swarm.membership.join_token import JoinToken
from molink.wire.messages.admin import ApplyFile, ApplyReply, LoadModelReply, ModelEntry
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import LeaderReply, LeaderRequest
from molink.wire.messages.rendezvous import CONTROL, COORDINATOR
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.api.administration import Administration
from molinkd.peer.agent.device_daemons import DeviceDaemons, primary_device_settings
from molinkd.peer.agent.device_probe import MeasuredDevice, measure_device
from molinkd.peer.agent.draft_model import DraftModelFolder
from molinkd.peer.agent.kernel_self_test import load_disabled_kernels
from molinkd.peer.artifacts.apply_handler import ApplyHandler
from molinkd.peer.artifacts.bootstrap import Bootstrap
from molinkd.peer.artifacts.hashing import Hasher, run_in_thread
from molinkd.peer.artifacts.model_loader import ModelLoader
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.sharded_model import find_stored_model
from molinkd.peer.artifacts.transfers import Progress, Transfers
from molinkd.peer.chosen_ports import check_chosen_ports
from molinkd.peer.control_service import ControlService, LeaderQueries, UserCommands
from molinkd.peer.election.leadership import Leadership, ReplicaFile
from molinkd.peer.frontend.api_endpoint import ApiEndpoint
from molinkd.peer.home import Home, HomeLock, RunFile
from molinkd.peer.launch import (
    Announce,
    AnyDaemonEvent,
    DaemonStartedEvent,
    Launch,
    ProblemReportedEvent,
    TransfersChangedEvent,
)
from molinkd.peer.membership.addresses import local_dial_host
from molinkd.peer.membership.discovery import DiscoveryScanner, SwarmAnnouncer
from molinkd.peer.membership.joining import join_swarm, renew_membership
from molinkd.peer.membership.membership_record import (
    MembershipRecord,
    choose_membership,
    read_membership,
)
from molinkd.peer.membership.port_mapper import PortMapper
from molinkd.peer.membership.rendezvous_client import RendezvousClient, open_rendezvous
from molinkd.peer.membership.upnp_client import UpnpClient
from molinkd.peer.node import Node
from molinkd.peer.resources import Resources
from molinkd.tasks import cancel_tasks

#: Delay of a requested stop, so that the reply is sent, in seconds.
_SHUTDOWN_DELAY_S = 0.2


class Daemon:
    """One run of a peer, while it holds its home's lock."""

    def __init__(self, launch: Launch, announce: Announce) -> None:
        #: Settings of the whole PC, with all devices.
        self._all_settings = launch.settings
        self._settings = primary_device_settings(launch.settings)
        self._launch = msgspec.structs.replace(launch, settings=self._settings)
        self._write_event = announce
        self._home = Home(Path(launch.home))
        self._stop = asyncio.Event()
        self._is_leaving = False
        #: Why the swarm rejected this PC.
        self._fatal: PeerBanned | UsageError | None = None
        self._transfers = Transfers()
        self._model_loader: ModelLoader | None = None
        self._apply_handler: ApplyHandler | None = None
        self._node: Node | None = None
        self._device_daemons: DeviceDaemons | None = None
        self._leadership: Leadership | None = None
        self._draft_model: DraftModelFolder | None = None
        self._rendezvous: RendezvousClient | None = None
        self._commands = UserCommands(
            self._query_status,
            self._forward_request,
            self._shutdown,
            self._drain,
            self._load_model,
            self._apply_file,
        )

    def _announce(self, event: AnyDaemonEvent) -> None:
        """Emit an event; an output error, such as a full disk, is ignored."""
        with contextlib.suppress(OSError):
            self._write_event(event)

    def stop(self) -> None:
        """Stop the run soon; call it on the daemon's loop."""
        self._stop.set()

    async def run(self) -> None:
        """Run until :meth:`stop` or cancellation; everything started has ended on return.

        Raises:
            MolinkError: The daemon can't start.
            PeerBanned: This PC was removed from the swarm.
            UsageError: Another PC runs with a copy of this state folder.
        """
        lock = HomeLock(self._home.create_folders())
        lock.acquire()
        try:
            async with AsyncExitStack() as stack:
                await self._start_parts(stack)
                await self._stop.wait()
            if self._is_leaving:
                retry_while_busy(partial(self._home.membership.unlink, missing_ok=True))
        finally:
            lock.release()
        if isinstance(self._fatal, PeerBanned):
            record = read_membership(self._home.membership)
            if record is not None:
                msgspec.structs.replace(record, is_banned=True).save(self._home.membership)
        if self._fatal is not None:
            raise self._fatal

    async def _start_parts(self, stack: AsyncExitStack) -> None:
        check_chosen_ports(self._settings)
        record = read_membership(self._home.membership)
        chosen = (
            choose_membership(self._home, record, self._launch.token)
            if self._launch.role == "join"
            else None
        )
        repository = ModelRepository(Hasher(self._home.hashes))
        keys = self._home.load_keys()
        bootstrap = self._make_bootstrap(self._launch, keys, repository)
        await self._find_model(bootstrap)
        measuring = asyncio.create_task(self._measure_device())
        stack.push_async_callback(cancel_tasks, measuring)
        hashing = asyncio.create_task(bootstrap.hash_model())
        stack.push_async_callback(cancel_tasks, hashing)
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        rendezvous = self._open_rendezvous(stack, keys, chosen or record)
        resources = await self._open_control(stack, context, repository, rendezvous)
        membership = await self._find_membership(context, keys, chosen, record)
        if membership is not None:
            text = str(rendezvous.address) if rendezvous is not None else ""
            membership = msgspec.structs.replace(membership, rendezvous=text)
        swarm = membership.swarm if membership is not None else None
        replica = ReplicaFile(self._home.replica, swarm)
        leadership = self._leadership = Leadership(
            resources,
            replica,
            membership,
            able=not self._launch.pc,
            on_misbehaviour=resources.server.report_misbehaviour,
            rendezvous=rendezvous,
        )
        stack.push_async_callback(leadership.close)
        if rendezvous is not None:
            rendezvous.start(partial(_find_socket, resources, leadership))
        if leadership.is_founder:
            await leadership.found_swarm()
        self._start_discovery(stack, leadership)
        self._save_models(leadership, bootstrap, record)
        measured = await measuring
        await hashing
        self._model_loader = self._make_model_loader(bootstrap.model, keys, repository, leadership)
        stack.push_async_callback(self._model_loader.close)
        self._apply_handler = self._make_apply_handler(keys, repository, leadership)
        stack.push_async_callback(self._apply_handler.close)
        node = await self._start_node(stack, resources, leadership, measured)
        assert self._device_daemons is not None
        self._device_daemons.start_daemons(
            measured, lambda: leadership.target, node.session.request
        )
        launches = self._applied_launches(record, bootstrap.extra_models)
        offering = self._offer_models(launches, keys, repository, node)
        for work in (bootstrap.request_serving(node.session), bootstrap.watch_files(), offering):
            stack.push_async_callback(cancel_tasks, asyncio.create_task(work))

    def _start_discovery(self, stack: AsyncExitStack, leadership: Leadership) -> None:
        """Announce the swarm on the local network, and look for others' announcements."""
        announcer = SwarmAnnouncer(self._settings, lambda: leadership.coordinator)
        stack.push_async_callback(announcer.close)
        announcer.start()
        scanner = DiscoveryScanner(self._settings, leadership)
        stack.push_async_callback(scanner.close)
        scanner.start()

    def _open_rendezvous(
        self, stack: AsyncExitStack, keys: KeyPair, known: MembershipRecord | JoinToken | None
    ) -> RendezvousClient | None:
        """This PC at the rendezvous of the settings, or of the token by which it came."""
        text = self._settings.rendezvous
        if not text and known is not None and self._launch.role == "join":
            text = known.rendezvous
        self._rendezvous = open_rendezvous(text, keys, local_dial_host(self._settings.host))
        if self._rendezvous is not None:
            stack.push_async_callback(self._rendezvous.close)
            self._rendezvous.on_problem = lambda text: self._announce(
                ProblemReportedEvent(text=text)
            )
        return self._rendezvous

    async def _map_ports(self, stack: AsyncExitStack) -> PortMapper | None:
        """Have the router forward this PC's ports, if it shall."""
        settings = self._settings
        if not settings.port_mapping:
            return None
        coordinator = 0 if self._launch.pc else settings.coordinator_port
        mapper = PortMapper(
            [port for port in (coordinator, settings.control_port, *settings.member_ports) if port],
            UpnpClient(self._home.logs / "upnp.log"),
        )
        stack.push_async_callback(mapper.close)
        await mapper.start()
        if mapper.failure:
            self._announce(
                ProblemReportedEvent(text=f"the router forwards no ports: {mapper.failure}")
            )
        return mapper

    def _make_bootstrap(
        self, launch: Launch, keys: KeyPair, repository: ModelRepository
    ) -> Bootstrap:
        return Bootstrap(launch, self._home, keys, repository, self._announce, self._transfers)

    async def _find_model(self, bootstrap: Bootstrap) -> None:
        """Find the model and emit transfer progress meanwhile."""

        def notify() -> None:
            self._announce(TransfersChangedEvent(transfers=self._transfers.transfer_states()))

        notifying = asyncio.create_task(self._transfers.watch_transfers(notify))
        try:
            await bootstrap.find_model()
            if self._settings.draft_model:
                await self._find_draft_model(self._settings.draft_model, bootstrap.path)
        finally:
            await cancel_tasks(notifying)

    async def _find_draft_model(self, name: str, served: Path | None) -> None:
        """Fetch the draft model and check that it fits the model in ``served``."""
        progress, into = Progress(source="hub"), self._home.unpacked

        def find(stop: threading.Event) -> DraftModelFolder:
            model = DraftModelFolder.find_draft(name, into, progress, stop)
            if served is not None:
                model.check_served(served)
            return model

        with self._transfers.track_transfer(name, progress):
            self._draft_model = await run_in_thread(find)

    def _make_launch(self, model: str, **changed: Any) -> Launch:
        """The launch for another model, with ``changed`` settings."""
        settings = msgspec.structs.replace(self._settings, **changed)
        return msgspec.structs.replace(self._launch, model=model, settings=settings)

    def _save_models(
        self, leadership: Leadership, bootstrap: Bootstrap, record: MembershipRecord | None
    ) -> None:
        """Store the membership, the models of this run and their adapters.

        A model that the command line names has the adapters of its options, not of an applied file.
        """
        adapters = record.adapters if record is not None else {}
        kept = {name: those for name, those in adapters.items() if name != self._launch.model}
        models = [bootstrap.model, *bootstrap.extra_models] if bootstrap.model else []
        leadership.save_models(models, kept)

    def _applied_launches(
        self, record: MembershipRecord | None, models: Sequence[str]
    ) -> list[Launch]:
        """The launches of applied models, with their adapters."""
        adapters = record.adapters if record is not None else {}
        return [self._make_launch(model, adapters=adapters.get(model, {})) for model in models]

    def _make_model_loader(
        self, first: str | None, keys: KeyPair, repository: ModelRepository, leadership: Leadership
    ) -> ModelLoader:
        def make_bootstrap(model: str) -> Bootstrap:
            # Adapters belong to the model that the daemon was started with.
            adapters = self._settings.adapters if model == first else {}
            launch = self._make_launch(model, adapters=adapters)
            return self._make_bootstrap(launch, keys, repository)

        def served(model: str) -> None:
            if self._launch.role == "up":
                leadership.save_models([model])  # also served after a restart

        return ModelLoader(make_bootstrap, self._forward_request, served)

    async def _find_membership(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        chosen: MembershipRecord | JoinToken | None,
        record: MembershipRecord | None,
    ) -> MembershipRecord | None:
        """The membership of this run; ``None`` if this PC founds a swarm.

        ``chosen`` is the membership or token that ``join`` uses, ``record`` that of the last run.
        """
        if chosen is None:
            return record
        if isinstance(chosen, MembershipRecord):
            return await self._rejoin(context, keys, chosen)
        return await self._join_swarm(context, keys, chosen, record)

    async def _rejoin(
        self, context: zmq.asyncio.Context, keys: KeyPair, record: MembershipRecord
    ) -> MembershipRecord:
        """The stored membership; if this PC was banned, ask whether the ban was lifted."""
        if not record.is_banned:
            return record
        try:
            return await renew_membership(context, keys, record, self._rendezvous)
        except PeerBanned as error:
            raise PeerBanned(
                f"{self._banned_text(record.swarm)} (just confirmed: {error})"
            ) from error

    def _make_apply_handler(
        self, keys: KeyPair, repository: ModelRepository, leadership: Leadership
    ) -> ApplyHandler:
        def make_bootstrap(entry: ModelEntry) -> Bootstrap:
            launch = self._make_launch(
                entry.source,
                dtype=entry.dtype,
                quantize=entry.quantize,
                kv_cache_dtype=entry.kv_cache_dtype,
                adapters=entry.adapters,
            )
            return self._make_bootstrap(launch, keys, repository)

        async def ask(message: ControlMessage, payload: bytes) -> tuple[ControlMessage, bytes]:
            return await self._require_node().forward_request(message, payload)

        def applied(entries: Sequence[ModelEntry]) -> None:
            if self._launch.role == "up":
                adapters = {entry.source: entry.adapters for entry in entries}
                leadership.save_models([*adapters], adapters)

        def kept(model: str) -> bool:
            return find_stored_model(self._home.models, model) is not None

        return ApplyHandler(make_bootstrap, ask, applied, kept)

    async def _offer_models(
        self, launches: Sequence[Launch], keys: KeyPair, repository: ModelRepository, node: Node
    ) -> None:
        """Offer the files of models that were applied in an earlier run."""
        for launch in launches:
            bootstrap = self._make_bootstrap(launch, keys, repository)
            try:
                await bootstrap.find_model()
                await bootstrap.hash_model()
            except MolinkError as error:
                self._announce(ProblemReportedEvent(text=str(error)))
            node.session.report_now()

    async def _join_swarm(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        token: JoinToken,
        record: MembershipRecord | None,
    ) -> MembershipRecord:
        """Join with the token, or continue as a member if the token fails."""
        try:
            return await join_swarm(context, keys, token, self._settings.name, self._rendezvous)
        except (TokenError, Unavailable) as error:
            if record is None or record.is_banned:
                raise
            why = "this PC is already a member, so it ignores the token"
            self._announce(ProblemReportedEvent(text=f"{why}: {error}"))
            return msgspec.structs.replace(record, addresses=token.addresses)

    async def _measure_device(self) -> MeasuredDevice:
        if self._settings.stage == "none":
            return MeasuredDevice(Device(kind="cpu", name="not used", memory=0), bf16=False)
        home = self._home
        measured = await measure_device(
            self._settings, home.device, kernel_checks=home.kernel_checks
        )
        disabled = load_disabled_kernels(home.disabled_kernels, measured.device.name)
        measured = measured.without_kernels(disabled)
        draft = self._draft_model
        return measured if draft is None else draft.reserve_memory(measured, self._settings)

    async def _open_control(
        self,
        stack: AsyncExitStack,
        context: zmq.asyncio.Context,
        repository: ModelRepository,
        rendezvous: RendezvousClient | None,
    ) -> Resources:
        """Open the control socket."""
        settings, keys = self._settings, self._home.load_keys()
        authenticator = ZapAuthenticator(context)
        me = authenticator.allow_peer(keys.public)
        authenticator.start()
        stack.callback(authenticator.close)
        banned_peers = BannedPeers()
        service = ControlService(
            me,
            repository,
            self._commands,
            LeaderQueries(self._answer_leader_request, self._coordinator_location),
        )
        server: Server[ControlMessage] = Server(
            context,
            keys,
            control_codec(),
            authenticator,
            service.handle_message,
            permits=service.is_permitted,
            on_blocked=partial(banned_peers.record_ban, "this PC's control socket"),
        )
        service.send = server.send
        server.bind(settings.host, settings.ports_to_try("control_port"), "--control-port")
        stack.push_async_callback(server.close)
        return Resources(
            settings,
            self._home,
            keys,
            context,
            authenticator,
            server,
            repository,
            banned_peers,
            self._announce,
            self._transfers,
            self._launch.pc,
            rendezvous,
            await self._map_ports(stack),
        )

    async def _start_node(
        self,
        stack: AsyncExitStack,
        resources: Resources,
        leadership: Leadership,
        measured: MeasuredDevice,
    ) -> Node:
        """Start the API and the session with the coordinator."""
        url, swarm = "", leadership.target.swarm
        node = Node(
            resources, leadership, lambda: url, partial(self._on_banned, swarm), self._on_duplicate
        )
        stack.push_async_callback(node.close)
        devices = self._device_daemons = DeviceDaemons(
            self._all_settings,
            self._home,
            resources.me,
            lambda: leadership.replica.name_of(resources.me, self._settings.name),
            resources.context,
            self._announce,
        )
        # All say goodbye together, so that the ring is re-formed once.
        stack.push_async_callback(lambda: asyncio.gather(node.send_goodbye(), devices.close()))
        api_key = owner_token = ""
        if not self._launch.pc:
            make = self._make_administration_factory(resources.me)
            endpoint = ApiEndpoint(self._settings, node.backend, make)
            await endpoint.start()
            stack.push_async_callback(endpoint.close)  # answers finish before the goodbye
            url, api_key, owner_token = endpoint.url, endpoint.api_key, endpoint.owner_token
        node.start(measured)
        self._node = node
        here = local_dial_host(self._settings.host)
        note = RunFile.of_this_process(
            resources.server.port,
            url,
            control_host=here,
            api_key=api_key,
            owner_token=owner_token,
        )
        note.save_file(self._home.run_file)
        stack.callback(retry_while_busy, partial(self._home.run_file.unlink, missing_ok=True))
        self._announce(
            DaemonStartedEvent(
                name=leadership.replica.name_of(resources.me, self._settings.name),
                swarm=swarm,
                endpoint=url,
                control_port=resources.server.port,
                pid=os.getpid(),
            )
        )
        return node

    def _make_administration_factory(self, peer_id: str) -> Callable[[], Administration]:
        loop = asyncio.get_running_loop()

        def make() -> Administration:
            # It needs the catalog and the hub's library, which few daemons ever use.
            from molinkd.peer.frontend.local_administration import LocalAdministration

            quantize = self._settings.quantize
            return LocalAdministration(self._home, peer_id, quantize, self._commands, loop)

        return make

    # --- requests of other peers ---

    def _answer_leader_request(self, peer: str, request: LeaderRequest) -> LeaderReply:
        if self._leadership is None:
            raise Unavailable("this daemon is still starting")
        return self._leadership.answer_request(peer, request)

    def _coordinator_location(self) -> tuple[str, tuple[str, ...], str]:
        if self._leadership is None or self._leadership.membership is None:
            raise Unavailable("this daemon is still starting")
        return self._leadership.coordinator_location()

    # --- requests of the command line ---

    async def _query_status(self, scale_out: bool) -> bytes:
        return await self._require_node().query_status(scale_out)

    async def _forward_request(self, message: ControlMessage) -> tuple[ControlMessage, bytes]:
        return await self._require_node().forward_request(message)

    async def _load_model(self, model: str) -> LoadModelReply:
        self._require_node()
        assert self._model_loader is not None
        return await self._model_loader.load_model(model)

    async def _apply_file(self, order: ApplyFile) -> tuple[LoadModelReply | ApplyReply, bytes]:
        self._require_node()
        assert self._apply_handler is not None
        return await self._apply_handler.apply_file(order)

    async def _shutdown(self, leave: bool) -> None:
        if leave:
            node = self._require_node()
            if self._device_daemons is not None:
                await self._device_daemons.leave_swarm()
            await node.leave_swarm()
            self._is_leaving = True
        asyncio.get_running_loop().call_later(_SHUTDOWN_DELAY_S, self._stop.set)

    def _drain(self, drain: bool, device: str) -> None:
        node = self._require_node()
        own = device == node.device
        if self._device_daemons is not None and not own:
            self._device_daemons.set_drained(drain, device)
        if own or not device:
            node.set_drained(drain)

    def _on_banned(self, swarm: str) -> None:
        self._fatal = PeerBanned(self._banned_text(swarm))
        self._stop.set()

    def _banned_text(self, swarm: str) -> str:
        name, me = self._settings.name, derive_peer_id(self._home.load_keys().public)
        name = name if self._leadership is None else self._leadership.replica.name_of(me, name)
        return (
            f"this PC was removed from swarm {swarm}. `molink un-revoke {name}` on "
            f"an owner's PC readmits it; then start it with "
            f"{self._home.format_command('join')}; {self._home.format_command('leave')} here "
            "forgets the swarm"
        )

    def _on_duplicate(self) -> None:
        self._fatal = UsageError(
            f"another running PC in the swarm has the same key: the state folder "
            f"{self._home.root} is a copy of that PC's. Delete peer.key and swarm.json in it, then "
            f"run {self._home.format_command('join')}: this PC joins under a new identity"
        )
        self._stop.set()

    def _require_node(self) -> Node:
        if self._node is None:
            raise Unavailable("the daemon is still starting; try again in a moment")
        return self._node


def _find_socket(resources: Resources, leadership: Leadership, wanted: bytes) -> int:
    """Port of the socket that a caller at the rendezvous asks for; 0 if there is none."""
    if wanted == COORDINATOR:
        return leadership.coordinator_port
    return resources.server.port if wanted == CONTROL else 0
