"""One daemon per additional device of this PC, supervised by the PC's primary daemon.

To the swarm each is an ordinary peer: its stage is placed, drained, paused and lost independently.
It has no API endpoint, never leads, and replicates no models, since its files are lost together
with this PC. It joins by an invitation of the primary daemon and stops with it.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq.asyncio

from molink.errors import MolinkError, PeerBanned, RequestError, Unavailable
from molink.files import make_plain_name, retry_while_busy
from molink.wire.messages.admin import DrainRequest, InviteReply, InviteRequest, ShutdownRequest
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.sockets.client import Client
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.secrets import private_folder
from molinkd.child_process import ChildProcess, exit_text
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    DAEMON_COMMAND,
    Announce,
    DaemonEndedEvent,
    DaemonStartedEvent,
    Launch,
    ProblemReportedEvent,
    StageStatusChangedEvent,
    read_event,
)
from molinkd.peer.membership.addresses import local_dial_host
from molinkd.peer.membership.membership_record import MembershipRecord, parse_token, read_membership
from molinkd.peer.settings import AUTO_EXPERT_MEMORY, MemoryShare, Settings
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Restart backoff of a device's daemon, in seconds; doubles after each failure.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
#: Lifetime of a device's invitation, in seconds.
_INVITATION_S = 600.0
#: Retry interval for an invitation while the swarm has no leader, in seconds.
_RETRY_S = 1.0
#: Grace period and reply timeout of a device's daemon, in seconds.
_GRACE_S, _ANSWER_S = 15.0, 5.0

#: Sends a request to the coordinator.
AskCoordinator = Callable[[ControlMessage], Coroutine[None, None, ControlMessage]]


def primary_device_settings(settings: Settings) -> Settings:
    """Settings of a PC's primary daemon, which uses the first device."""
    return _with_device(settings, settings.devices[0])


def additional_devices(settings: Settings, measured: MeasuredDevice) -> tuple[str, ...]:
    """The configured devices besides the ``measured`` one; ``auto`` means all GPUs."""
    if settings.stage == "none":
        return ()
    if settings.device != "auto":
        return settings.devices[1:]
    if settings.stage != "auto" or measured.device.kind != "cuda":
        return ()
    return tuple(f"cuda:{i}" for i in range(measured.gpus) if i != measured.device.index)


def device_settings(settings: Settings, device: str) -> Settings:
    """Settings of the daemon for an additional ``device``."""
    return msgspec.structs.replace(
        _with_device(settings, device),
        stage="auto",
        api_port=0,
        chosen_ports=(),
        discovery=False,
        relay=False,
        replicate_models=False,
    )


def _with_device(settings: Settings, device: str) -> Settings:
    """``settings`` for one device, its memory split if the device is listed several times."""
    times = max(1, settings.devices.count(device))
    return msgspec.structs.replace(
        settings,
        device=device,
        stages_per_host=min(64, settings.stages_per_host * times),
        memory=_share_memory(settings.memory, times),
        # All devices of a PC share its host memory.
        expert_memory=_share_memory(settings.expert_memory, len(settings.devices) or 1),
    )


def _share_memory(memory: int | MemoryShare, times: int) -> int | MemoryShare:
    if isinstance(memory, MemoryShare):
        return MemoryShare(memory.percent / times)
    return memory if memory == AUTO_EXPERT_MEMORY else memory // times


def device_labels(own: str, further: Sequence[str]) -> list[str]:
    """Labels of the additional devices next to ``own``: ``cuda:1``, ``cpu.2`` if repeated."""
    known, found = [own], []
    for device in further:
        known.append(device)
        times = known.count(device)
        found.append(device if times == 1 else f"{device}.{times}")
    return found


@dataclass(slots=True)
class _DeviceDaemon:
    label: str
    home: Home
    settings: Settings
    child: ChildProcess | None = None
    #: Port of the daemon's control socket; 0 until it listens.
    port: int = 0
    ended: DaemonEndedEvent | None = None
    is_drained: bool = False


class DeviceDaemons:
    """The daemons of this PC's additional devices."""

    def __init__(
        self,
        settings: Settings,
        home: Home,
        me: str,
        name: Callable[[], str],
        context: zmq.asyncio.Context,
        announce: Announce,
    ) -> None:
        """``settings`` belong to the whole PC, whose primary peer is ``me``; ``name()`` is its name
        in the swarm.
        """
        self._settings, self._home, self._me, self._name = settings, home, me, name
        self._context, self._announce = context, announce
        self._daemons: list[_DeviceDaemon] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._runners: list[asyncio.Task[None]] = []
        #: Suppresses restarts: a cancellation can be lost in a wait that ends at the same moment.
        self._is_ending = False

    def start_daemons(
        self, measured: MeasuredDevice, swarm: Callable[[], MembershipRecord], ask: AskCoordinator
    ) -> None:
        """Start a daemon for each device besides the ``measured`` one.

        ``swarm()`` returns this PC's current membership; ``ask`` sends a request to the
        coordinator.
        """
        devices = additional_devices(self._settings, measured)
        for device, label in zip(devices, device_labels(measured.name, devices), strict=True):
            # The folder contains this PC's id, so a copied state folder does not reuse its devices.
            home = Home(self._home.devices / self._me / make_plain_name(label, "device"))
            one = _DeviceDaemon(label, home, device_settings(self._settings, device))
            self._daemons.append(one)
            task = asyncio.create_task(self._keep_running(one, swarm, ask), name=f"molink-{label}")
            self._runners.append(task)

    async def close(self) -> None:
        """Stop all daemons."""
        self._is_ending = True
        await cancel_tasks(*self._runners, *self._tasks)

    def set_drained(self, drain: bool, label: str = "") -> None:
        """Drain or resume all daemons, or the one with ``label``.

        Raises:
            RequestError: There is no such device.
        """
        named = [one for one in self._daemons if label in ("", one.label)]
        if label and not named:
            have = ", ".join(one.label for one in self._daemons) or "none besides its primary one"
            raise RequestError(f"this PC has no device {label}; it has {have}", param="device")
        for one in named:
            one.is_drained = drain
            self._spawn(self._send_request(one, DrainRequest(ref=0, drain=drain)))

    async def leave_swarm(self) -> None:
        """Make all daemons leave the swarm."""
        self._is_ending = True
        requests = (
            self._send_request(one, ShutdownRequest(ref=0, leave=True)) for one in self._daemons
        )
        await asyncio.gather(*requests)

    # --- one device ---

    async def _keep_running(
        self, one: _DeviceDaemon, swarm: Callable[[], MembershipRecord], ask: AskCoordinator
    ) -> None:
        """Run the daemon and restart it with backoff."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            began = loop.time()
            try:
                ended = await self._run_daemon(one, await self._request_token(one, swarm(), ask))
            except (MolinkError, OSError) as error:
                ended = DaemonEndedEvent(code=1, text=str(error))
            if self._is_ending:
                return
            if ended.code == PeerBanned.exit_code:
                self._announce(ProblemReportedEvent(text=f"{one.label}: {ended.text}"))
                return
            if loop.time() - began > LAST_PAUSE_S:
                pause = FIRST_PAUSE_S
            again = f"restarting in {pause:g} s"
            self._announce(
                ProblemReportedEvent(text=f"{one.label} holds no layers: {ended.text}; {again}")
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    async def _request_token(
        self, one: _DeviceDaemon, swarm: MembershipRecord, ask: AskCoordinator
    ) -> str | None:
        """An invitation, unless the device's daemon is already a member of ``swarm``."""
        known = read_membership(one.home.membership)
        if known is not None and known.swarm == swarm.swarm:
            return None
        if known is not None:  # left over from another swarm
            await asyncio.to_thread(retry_while_busy, partial(shutil.rmtree, one.home.root))
        while True:
            try:
                reply = await ask(InviteRequest(ref=0, ttl=_INVITATION_S, uses=1))
            except Unavailable as error:
                log.info("%s: %s", one.label, error)
                await asyncio.sleep(_RETRY_S)
            else:
                assert isinstance(reply, InviteReply)
                # The token's addresses may be unreachable from this PC.
                token = parse_token(reply.token)
                return str(msgspec.structs.replace(token, addresses=swarm.addresses))

    async def _run_daemon(self, one: _DeviceDaemon, token: str | None) -> DaemonEndedEvent:
        """Run the daemon once, until it exits."""
        exited = asyncio.get_running_loop().create_future()
        private_folder(self._home.devices)
        private_folder(one.home.root.parent)
        private_folder(one.home.root)
        self._copy_measurements(one)
        settings = msgspec.structs.replace(one.settings, name=f"{self._name()[:48]}/{one.label}")
        launch = Launch(
            home=str(one.home.root), settings=settings, role="join", token=token, pc=self._me
        )
        one.ended, one.port = None, 0
        one.child = child = ChildProcess(
            f"device {one.label}",
            DAEMON_COMMAND,
            reader=read_event,
            on_message=partial(self._on_event, one),
            on_exit=lambda code: None if exited.done() else exited.set_result(code),
            log_file=self._home.logs / f"device-{make_plain_name(one.label, 'device')}.log",
        )
        child.start()
        child.send(msgspec.json.encode(launch) + b"\n")
        try:
            code = await exited
        finally:
            one.port = 0
            await child.stop(_GRACE_S)
        last = (child.tail.splitlines() or [""])[-1]
        return one.ended or DaemonEndedEvent(
            code=1, text=f"its daemon {exit_text(code)}. {last}".strip()
        )

    def _copy_measurements(self, one: _DeviceDaemon) -> None:
        """Copy the disabled kernels, and the device measurement if the device is the same."""
        known = [(self._home.disabled_kernels, one.home.disabled_kernels)]
        if one.settings.device == self._settings.devices[0]:
            known.append((self._home.device, one.home.device))
        for here, there in known:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(here, there)

    def _on_event(self, one: _DeviceDaemon, event: object) -> None:
        match event:
            case DaemonStartedEvent():
                one.port = event.control_port
                if one.is_drained:
                    self._spawn(self._send_request(one, DrainRequest(ref=0, drain=True)))
            case StageStatusChangedEvent():
                self._announce(StageStatusChangedEvent(text=f"{one.label}: {event.text}"))
            case ProblemReportedEvent():
                self._announce(ProblemReportedEvent(text=f"{one.label}: {event.text}"))
            case DaemonEndedEvent():
                one.ended = event

    async def _send_request(self, one: _DeviceDaemon, message: ControlMessage) -> None:
        """Send a request to the daemon's control socket; failures are only logged."""
        if not one.port:
            return
        keys, hosts = one.home.load_keys(), [local_dial_host(self._settings.host)]
        client: Client[ControlMessage] = Client(
            self._context,
            keys,
            control_codec(),
            keys.public,
            endpoints(hosts, one.port),
            name=f"the daemon of {one.label}",
        )
        client.start()
        try:
            await client.send_request(message, timeout=_ANSWER_S)
        except MolinkError as error:
            log.warning("%s", error)
        finally:
            await client.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
