"""The daemon of one PC: puts its parts together, runs them, and ends them in order."""

import asyncio
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import zmq.asyncio

from molink.errors import Unavailable
from molink.facts.device import Device
from molink.files import patiently
from molink.swarm.offenders import Offenders
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control import ControlMessage
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import Gatekeeper
from molinkd.peer.addresses import from_here
from molinkd.peer.device_probe import Measured, measure_device
from molinkd.peer.endpoint import Endpoint
from molinkd.peer.founder import Founder
from molinkd.peer.home import Home, HomeLock
from molinkd.peer.launch import Announce, Launch, Listening
from molinkd.peer.library import Library
from molinkd.peer.membership import Membership, choose, join, read_membership
from molinkd.peer.node import Node, Resources
from molinkd.peer.runfile import RunFile
from molinkd.peer.service import Service, UserCommands
from molinkd.peer.settings import port_range

#: Until the answer to an order to stop is out, in seconds.
_LAST_WORDS_S = 0.2


class Daemon:
    """One run of a peer, from taking its home's lock to letting go of it."""

    def __init__(self, launch: Launch, announce: Announce) -> None:
        self._launch = launch
        self._announce = announce
        self._settings = launch.settings
        self._home = Home(Path(launch.home))
        self._stop = asyncio.Event()
        self._leaving = False
        self._node: Node | None = None

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
                patiently(partial(self._home.membership.unlink, missing_ok=True))
        finally:
            lock.release()

    async def _start(self, stack: AsyncExitStack) -> None:
        known = read_membership(self._home.membership)
        chosen = choose(known, self._launch.token) if self._launch.role == "join" else None
        library = Library()
        keys = self._home.keys()
        founder = Founder(self._launch, self._home, keys, library, self._announce)
        await founder.find_model()
        measuring = asyncio.create_task(self._measure())
        stack.push_async_callback(_cancel, measuring)
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        resources = self._resources(stack, context, library)
        if chosen is None:
            membership = await founder.start_coordinator(stack)
        elif isinstance(chosen, Membership):
            membership = chosen
        else:
            membership = await join(context, keys, chosen, self._settings.name)
        membership.save(self._home.membership)
        measured = await measuring
        node = await self._enter(stack, resources, membership, measured)
        serving = asyncio.create_task(founder.serve(node.session))
        stack.push_async_callback(_cancel, serving)

    async def _measure(self) -> Measured:
        if self._settings.stage == "none":
            return Measured(Device(kind="cpu", name="not used", memory=0), bf16=False)
        return await measure_device(self._settings, self._home.device)

    def _resources(
        self, stack: AsyncExitStack, context: zmq.asyncio.Context, library: Library
    ) -> Resources:
        """Open the control socket."""
        settings, keys = self._settings, self._home.keys()
        gatekeeper = Gatekeeper(context)
        me = gatekeeper.allow(keys.public)
        gatekeeper.start()
        stack.callback(gatekeeper.close)
        commands = UserCommands(self._status, self._invite, self._revoke, self._shutdown)
        offenders = Offenders()
        service = Service(me, library, commands)
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
        server.bind(settings.host, port_range(settings.control_port), "--control-port")
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
        )

    async def _enter(
        self,
        stack: AsyncExitStack,
        resources: Resources,
        membership: Membership,
        measured: Measured,
    ) -> Node:
        """Open the endpoint and begin the session with the coordinator."""
        url = ""
        node = Node(resources, membership, lambda: url)
        stack.push_async_callback(node.close)
        endpoint = Endpoint(self._settings, node.requests)
        await endpoint.start()
        stack.push_async_callback(endpoint.close)
        url = endpoint.url
        stack.push_async_callback(node.goodbye)
        node.start(measured)
        self._node = node
        here = from_here(self._settings.host)
        note = RunFile.of_this_process(resources.server.port, url, control_host=here)
        note.save(self._home.run_file)
        stack.callback(patiently, partial(self._home.run_file.unlink, missing_ok=True))
        self._announce(
            Listening(
                name=self._settings.name,
                swarm=membership.swarm,
                endpoint=url,
                control_port=resources.server.port,
                pid=os.getpid(),
            )
        )
        return node

    # --- the command line --------------------------------------------------------------------

    async def _status(self) -> bytes:
        return await self._running().status()

    async def _invite(self, ttl: float) -> str:
        return await self._running().invite(ttl)

    async def _revoke(self, target: str) -> None:
        await self._running().revoke(target)

    async def _shutdown(self, leave: bool) -> None:
        if leave:
            await self._running().leave()
            self._leaving = True
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._stop.set)

    def _running(self) -> Node:
        if self._node is None:
            raise Unavailable("the daemon is still starting; try again in a moment")
        return self._node


async def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
