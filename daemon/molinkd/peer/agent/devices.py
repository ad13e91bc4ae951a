"""Further devices of this PC: a daemon of its own for each, which this PC's daemon starts and ends.

To the swarm such a daemon is a peer like any other: its stage is placed, lost, drained and paused
by itself. But it has no endpoint, never leads, and copies no layers for others: what it would keep
is lost with this PC. It becomes a member by an invitation of this PC, and goes with it.
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

from molink.errors import MolinkError, RequestError, ShutOut, Unavailable
from molink.files import patiently, plain_name
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.requests import DrainRequest, Invite, InviteRequest, ShutdownRequest
from molink.wire.sockets.client import Client
from molink.wire.sockets.endpoints import endpoints
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.agent.child import Child, how_it_ended
from molinkd.peer.agent.device_probe import Measured
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    DAEMON_COMMAND,
    Announce,
    Ended,
    Launch,
    Listening,
    StageNow,
    Trouble,
    read_event,
)
from molinkd.peer.membership.addresses import from_here
from molinkd.peer.membership.membership import Membership, parse_token, read_membership
from molinkd.peer.settings import Settings, Share

log = logging.getLogger(__name__)

#: From a daemon that ended to the next one for its device, in seconds: twice as long each time.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
#: How long the invitation for a device holds, in seconds.
_INVITATION_S = 600.0
#: Until one is asked for again where nobody leads, in seconds.
_RETRY_S = 1.0
#: How long a daemon may take to end, and to answer, in seconds.
_GRACE_S, _ANSWER_S = 15.0, 5.0

#: Asks the coordinator.
Ask = Callable[[ControlMessage], Coroutine[None, None, ControlMessage]]


def own_settings(settings: Settings) -> Settings:
    """Those of a PC's own daemon: of its devices it has the first."""
    return _on(settings, settings.devices[0])


def others(settings: Settings, measured: Measured) -> tuple[str, ...]:
    """The devices beside the PC's own, ``measured`` one. ``auto`` is all GPUs."""
    if settings.stage == "none":
        return ()
    if settings.device != "auto":
        return settings.devices[1:]
    if settings.stage != "auto" or measured.device.kind != "cuda":
        return ()
    return tuple(f"cuda:{i}" for i in range(measured.gpus) if i != measured.device.index)


def device_settings(settings: Settings, device: str, name: str) -> Settings:
    """Those of the daemon of a further device, called ``name``."""
    return msgspec.structs.replace(
        _on(settings, device),
        name=name,
        stage="auto",
        endpoint_port=0,
        chosen_ports=(),
        discovery=False,
        relay=False,
        copies=False,
    )


def _on(settings: Settings, device: str) -> Settings:
    """With that device; one that is named several times is shared."""
    times = max(1, settings.devices.count(device))
    memory = settings.memory
    return msgspec.structs.replace(
        settings,
        device=device,
        stages_here=min(64, settings.stages_here * times),
        memory=Share(memory.percent / times) if isinstance(memory, Share) else memory // times,
    )


def labels(own: str, further: Sequence[str]) -> list[str]:
    """What further devices are called beside ``own``: ``cuda:1``, and ``cpu.2`` for a second."""
    known, found = [own], []
    for device in further:
        known.append(device)
        times = known.count(device)
        found.append(device if times == 1 else f"{device}.{times}")
    return found


@dataclass(slots=True)
class _Device:
    label: str
    home: Home
    settings: Settings
    child: Child | None = None
    #: Of its daemon's control socket; 0 as long as that isn't up.
    port: int = 0
    ended: Ended | None = None
    drained: bool = False


class FurtherDevices:
    """The daemons of this PC's further devices. All times are in seconds."""

    def __init__(
        self, settings: Settings, home: Home, me: str, context: zmq.asyncio.Context, say: Announce
    ) -> None:
        """``settings`` are those of the whole PC, whose peer is ``me``."""
        self._settings, self._home, self._me = settings, home, me
        self._context, self._say = context, say
        self._devices: list[_Device] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: list[asyncio.Task[None]] = []
        #: None is started again: a cancellation may be lost in a wait that ends at the same time.
        self._ending = False

    def start(self, measured: Measured, swarm: Callable[[], Membership], ask: Ask) -> None:
        """Have a daemon for each device beside the ``measured`` one; ``ask`` as this PC.

        ``swarm()`` is where this PC knows its coordinator.
        """
        devices = others(self._settings, measured)
        for device, label in zip(devices, labels(measured.name, devices), strict=True):
            # Bound to this PC's key: a copied state folder has devices of another PC.
            home = Home(self._home.devices / self._me / plain_name(label, "device"))
            name = f"{self._settings.name[:48]}/{label}"
            one = _Device(label, home, device_settings(self._settings, device, name))
            self._devices.append(one)
            task = asyncio.create_task(self._keep(one, swarm, ask), name=f"molink-{label}")
            self._keeping.append(task)

    async def close(self) -> None:
        """End all of them."""
        self._ending = True
        for task in (*self._keeping, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._keeping, *self._tasks, return_exceptions=True)

    def drain(self, drain: bool, label: str = "") -> None:
        """Have all of them, or that one, hold no layers for now, or do so again.

        Raises:
            RequestError: there is no such device.
        """
        named = [one for one in self._devices if label in ("", one.label)]
        if label and not named:
            have = ", ".join(one.label for one in self._devices) or "none beside its own"
            raise RequestError(f"this PC has no device {label}; it has {have}", param="device")
        for one in named:
            one.drained = drain
            self._spawn(self._tell(one, DrainRequest(ref=0, drain=drain)))

    async def leave(self) -> None:
        """Have all of them leave the swarm for good."""
        self._ending = True
        told = (self._tell(one, ShutdownRequest(ref=0, leave=True)) for one in self._devices)
        await asyncio.gather(*told)

    # --- one device ------------------------------------------------------------------------------

    async def _keep(self, one: _Device, swarm: Callable[[], Membership], ask: Ask) -> None:
        """Start it again and again, if it has to be."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            began = loop.time()
            try:
                ended = await self._run(one, await self._token(one, swarm(), ask))
            except (MolinkError, OSError) as error:
                ended = Ended(code=1, text=str(error))
            if self._ending:
                return
            if ended.code == ShutOut.exit_code:
                self._say(Trouble(text=f"{one.label}: {ended.text}"))
                return
            if loop.time() - began > LAST_PAUSE_S:
                pause = FIRST_PAUSE_S
            again = f"it is started again in {pause:g} s"
            self._say(Trouble(text=f"{one.label} holds no layers: {ended.text}; {again}"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    async def _token(self, one: _Device, swarm: Membership, ask: Ask) -> str | None:
        """An invitation for a device that is no member yet."""
        known = read_membership(one.home.membership)
        if known is not None and known.swarm == swarm.swarm:
            return None
        if known is not None:  # of a swarm that this PC was in before
            await asyncio.to_thread(patiently, partial(shutil.rmtree, one.home.root))
        while True:
            try:
                reply = await ask(InviteRequest(ref=0, ttl=_INVITATION_S, uses=1))
            except Unavailable as error:
                log.info("%s: %s", one.label, error)
                await asyncio.sleep(_RETRY_S)
            else:
                assert isinstance(reply, Invite)
                # Others may know the coordinator by an address that leads nowhere from here.
                token = parse_token(reply.token)
                return str(msgspec.structs.replace(token, addresses=swarm.addresses))

    async def _run(self, one: _Device, token: str | None) -> Ended:
        """Its daemon, from the start to the end."""
        exited = asyncio.get_running_loop().create_future()
        private_folder(self._home.devices)
        private_folder(one.home.root.parent)
        private_folder(one.home.root)
        self._hand_down(one)
        launch = Launch(
            home=str(one.home.root), settings=one.settings, role="join", token=token, pc=self._me
        )
        one.ended, one.port = None, 0
        one.child = child = Child(
            f"device {one.label}",
            DAEMON_COMMAND,
            reader=read_event,
            on_message=partial(self._said, one),
            on_exit=lambda code: None if exited.done() else exited.set_result(code),
            log_file=self._home.logs / f"device-{plain_name(one.label, 'device')}.log",
        )
        child.start()
        child.send(msgspec.json.encode(launch) + b"\n")
        try:
            code = await exited
        finally:
            one.port = 0
            await child.stop(_GRACE_S)
        last = (child.tail.splitlines() or [""])[-1]
        return one.ended or Ended(code=1, text=f"its daemon {how_it_ended(code)}. {last}".strip())

    def _hand_down(self, one: _Device) -> None:
        """What is known of this PC's device, if it is the same one, and of kernels to avoid."""
        known = [(self._home.avoid, one.home.avoid)]
        if one.settings.device == self._settings.devices[0]:
            known.append((self._home.device, one.home.device))
        for here, there in known:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(here, there)

    def _said(self, one: _Device, event: object) -> None:
        match event:
            case Listening():
                one.port = event.control_port
                if one.drained:
                    self._spawn(self._tell(one, DrainRequest(ref=0, drain=True)))
            case StageNow():
                self._say(StageNow(text=f"{one.label}: {event.text}"))
            case Trouble():
                self._say(Trouble(text=f"{one.label}: {event.text}"))
            case Ended():
                one.ended = event

    async def _tell(self, one: _Device, message: ControlMessage) -> None:
        """Ask its daemon, as its user; one that isn't up, or doesn't answer, is logged."""
        if not one.port:
            return
        keys, hosts = one.home.keys(), [from_here(self._settings.host)]
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
            await client.request(message, timeout=_ANSWER_S)
        except MolinkError as error:
            log.warning("%s", error)
        finally:
            await client.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
