"""What founding a swarm takes beyond being a peer: a model, and a coordinator that places it."""

import asyncio
import logging
from contextlib import AsyncExitStack

import msgspec

from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.source import find_model
from molink.errors import MolinkError, Unavailable, UsageError
from molink.facts.model import ModelFacts
from molink.wire.messages.control import ControlMessage, Invite, InviteRequest, ServeModel
from molink.wire.sockets.curve import KeyPair
from molinkd.peer.addresses import advertised, from_here
from molinkd.peer.coordinator_child import CoordinatorProcess
from molinkd.peer.home import Home
from molinkd.peer.launch import Announce, Invitation, Launch, Serving, Trouble
from molinkd.peer.library import Library
from molinkd.peer.membership import Membership, read_membership
from molinkd.peer.quantize import check_files, check_quantize
from molinkd.peer.session import CoordinatorSession
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)

_RETRY_S = 1.0


async def start_coordinator(
    home: Home, keys: KeyPair, settings: Settings, stack: AsyncExitStack
) -> Membership:
    """Run the coordinator of ``home`` in a process that ends with ``stack``.

    The holder of ``keys`` is a member from the start.

    Raises:
        UsageError: it can't start; says why.
    """
    known = read_membership(home.membership)
    port = settings.coordinator_port
    if known is not None and port:
        # The members know the port of the last run.
        port = int(known.addresses[0].rpartition(":")[2])

    def arguments(port: int) -> list[str]:
        options = ["--state", str(home.coordinator), "--host", settings.host]
        options += ["--port", str(port), "--member", f"{keys.public}:{settings.name}"]
        for address in advertised(settings.host, settings.advertise):
            options += ["--address", address]
        return options

    process = CoordinatorProcess(arguments, port, home.logs)
    stack.push_async_callback(process.close)
    announcement = await process.start()
    return Membership(
        swarm=announcement.swarm,
        coordinator_key=announcement.public_key,
        addresses=(f"{from_here(settings.host)}:{announcement.port}",),
        own=True,
        model=known.model if known is not None else None,
    )


class Founder:
    """The part of a daemon that brings a model, and for ``up`` the coordinator too."""

    def __init__(
        self, launch: Launch, home: Home, keys: KeyPair, library: Library, announce: Announce
    ) -> None:
        self._launch = launch
        self._settings = launch.settings
        self._home = home
        self._keys = keys
        self._library = library
        self._announce = announce
        self._facts: ModelFacts | None = None
        self._model: str | None = None

    async def find_model(self) -> None:
        """Find and check the model before anything is started.

        Raises:
            ModelError: it can't be found or served; says why.
            UsageError: this PC belongs to another swarm, or can't quantize as asked.
        """
        self._model = self._launch.model
        if self._launch.role == "up":
            known = read_membership(self._home.membership)
            if known is not None and not known.own:
                raise UsageError(
                    f"this PC is a member of swarm {known.swarm}: start it with `molink join`, or "
                    "run `molink leave` first."
                )
            self._model = self._model or (known.model if known is not None else None)
        elif self._model is None:
            return
        source = await asyncio.to_thread(find_model, self._model)
        folder = await asyncio.to_thread(ModelFolder.open, source.path)
        check = check_files if self._settings.stage == "none" else check_quantize
        check(self._settings.quantize, folder.config)
        self._facts = folder.facts(source.name)
        await asyncio.to_thread(self._library.add, source.name, source.path)
        self._announce(Serving(model=source.name, path=str(source.path)))

    async def start_coordinator(self, stack: AsyncExitStack) -> Membership:
        """Start the coordinator process; it ends with the daemon.

        Raises:
            UsageError: it can't start; says why.
        """
        membership = await start_coordinator(self._home, self._keys, self._settings, stack)
        return msgspec.structs.replace(membership, model=self._model)

    async def serve(self, session: CoordinatorSession) -> None:
        """Ask the coordinator to serve the model and, for ``up``, for a join token."""
        if self._facts is None:
            return
        settings = self._settings
        order = ServeModel(
            ref=0,
            model=self._facts,
            min_peers=settings.min_peers,
            dtype=settings.dtype,
            micro_batches=settings.micro_batches,
            quantize=settings.quantize,
        )
        requests: list[ControlMessage] = [order]
        if self._launch.role == "up":
            requests.append(InviteRequest(ref=0, ttl=settings.token_ttl))
        for request in requests:
            while True:
                try:
                    reply = await session.request(request)
                    break
                except Unavailable as error:
                    log.info("%s", error)
                    await asyncio.sleep(_RETRY_S)
                except MolinkError as error:
                    self._announce(Trouble(text=str(error)))
                    return
            if isinstance(reply, Invite):
                self._announce(Invitation(token=reply.token))
