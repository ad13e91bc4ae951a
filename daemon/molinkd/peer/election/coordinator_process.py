"""Runs the coordinator process and restarts it."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from molink.errors import PortInUse, StateError, UsageError, WorkerError
from molink.swarm.election.events import StartCoordinatorAction
from molink.wire.sockets.key_pair import KeyPair
from molinkd.child_process import ChildProcess, exit_text
from molinkd.peer.home import Home
from molinkd.peer.membership.membership_record import MembershipRecord
from molinkd.peer.settings import Settings
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

COORDINATOR_COMMAND = (sys.executable, "-P", "-m", "molinkd.coordinator")
START_TIMEOUT_S = 150.0 if sys.platform == "win32" else 30.0
#: Backoff before a restart, in seconds.
BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: Consecutive failures after which another PC should lead, and if the state can't be written, for
#: example because the disk is full. One restart costs little, and keeps the pipelines if it helps.
FAILURES_TO_REPORT = 3
STATE_FAILURES = 2
#: Uptime that resets the backoff, in seconds.
_SETTLED_S = 60.0
GRACE_S = 5.0


class CoordinatorAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The line that a coordinator prints once it listens.

    ``restored`` describes a recovery of lost state. ``name`` is the swarm's name, ``pairing_port``
    the port for joining without a token (0: none).
    """

    port: int
    public_key: str
    swarm: str
    term: int = 0
    addresses: tuple[str, ...] = ()
    restored: str = ""
    name: str = ""
    pairing_port: int = 0


class CoordinatorHost(Protocol):
    """What a coordinator process needs from its PC."""

    @property
    def settings(self) -> Settings: ...
    @property
    def home(self) -> Home: ...
    @property
    def keys(self) -> KeyPair: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...


class CoordinatorProcess:
    """Supervises one coordinator process."""

    def __init__(
        self,
        arguments: Callable[[int], list[str]],
        port: int,
        logs: Path,
        command: tuple[str, ...] = COORDINATOR_COMMAND,
        on_failing: Callable[[], None] = lambda: None,
    ) -> None:
        """``arguments(port)`` returns the options of ``python -m molinkd.coordinator``.

        ``on_failing`` is called after repeated failures, so that another PC can take over.
        """
        self._on_failing = on_failing
        self._arguments = arguments
        self._port = port
        self._log_file = logs / "coordinator.log"
        self._command = command
        self._child: ChildProcess | None = None
        self._announced: asyncio.Future[CoordinatorAnnouncement] | None = None
        #: Announcement of the running process; ``None`` while it is down.
        self.announcement: CoordinatorAnnouncement | None = None
        self._exited = asyncio.Event()
        self._exit_code = 0
        #: Last term set by :meth:`raise_term`.
        self._term = 0
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> CoordinatorAnnouncement:
        """Start the process and wait until it listens; from then on it is restarted.

        Raises:
            UsageError: It exited immediately; the message quotes the reason.
        """
        announcement = await self._launch()
        # Peers know this port, so a restart must reuse it.
        self._port = announcement.port
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        return announcement

    async def close(self) -> None:
        """Stop the process."""
        await cancel_tasks(self._supervisor)
        if self._child is not None:
            await self._child.stop(GRACE_S)

    @property
    def port(self) -> int:
        """Port that the coordinator listens on."""
        return self._port

    def raise_term(self, term: int) -> None:
        """Continue in a higher term, also after a restart."""
        self._term = term
        if self._child is not None:
            self._child.send(b"%d\n" % term)

    @property
    def pid(self) -> int:
        """Process id; 0 while it is down."""
        return self._child.pid if self._child is not None and self._child.is_running else 0

    async def _launch(self) -> CoordinatorAnnouncement:
        loop = asyncio.get_running_loop()
        announced: asyncio.Future[CoordinatorAnnouncement] = loop.create_future()
        self._announced = announced
        self._exited.clear()
        child = ChildProcess(
            "coordinator",
            [*self._command, *self._arguments(self._port)],
            reader=read_announcement,
            on_message=self._on_message,
            on_exit=self._on_exit,
            log_file=self._log_file,
        )
        child.start()
        self._child = child
        try:
            # `wait_for` of Python 3.11 may swallow the cancellation of this task.
            async with asyncio.timeout(START_TIMEOUT_S):
                return await announced
        except TimeoutError:
            await child.stop(0.0)
            raise WorkerError(f"the coordinator did not start; see {self._log_file}") from None

    def _on_message(self, message: object) -> None:
        if self._announced is not None and not self._announced.done():
            assert isinstance(message, CoordinatorAnnouncement)
            self.announcement = message
            self._announced.set_result(message)

    def _on_exit(self, code: int) -> None:
        self._exited.set()
        self._exit_code, self.announcement = code, None
        if self._announced is not None and not self._announced.done() and self._child is not None:
            last = (self._child.tail.splitlines() or [""])[-1].removeprefix("error: ")
            kind = PortInUse if code == PortInUse.exit_code else UsageError
            self._announced.set_exception(
                kind(f"the coordinator can't start: {last or exit_text(code)}")
            )

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        failures, started = 0, loop.time()
        while True:
            await self._exited.wait()
            if loop.time() - started > _SETTLED_S:
                failures = 0
            pause = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            failures += 1
            in_state = self._exit_code == StateError.exit_code
            if failures == FAILURES_TO_REPORT or (in_state and failures == STATE_FAILURES):
                self._on_failing()
            log.warning("the coordinator exited; restarting it in %.1f s", pause)
            await asyncio.sleep(pause)
            started = loop.time()
            try:
                announced = await self._launch()
                if announced.term < self._term:
                    self.raise_term(self._term)
            except (UsageError, WorkerError, OSError) as error:
                log.warning("%s", error)
                self._exited.set()


def create_coordinator_process(
    host: CoordinatorHost,
    membership: MembershipRecord | None,
    replica: Path | None,
    action: StartCoordinatorAction,
    leader: str,
    on_failing: Callable[[], None] = lambda: None,
) -> CoordinatorProcess:
    """The coordinator process for the ``action`` of the election; not started yet.

    ``leader`` is this peer's id; empty for a standalone coordinator.
    """
    settings, home = host.settings, host.home
    # Options of the first start only.
    once = ["--lost-peer", action.lost_leader] if action.lost_leader else []
    if membership is None and "coordinator_port" in settings.chosen_ports:
        once.append("--only-port")  # peers of an existing swarm know the port

    def arguments(port: int) -> list[str]:
        options = ["--state", str(home.coordinator), "--host", settings.host, "--port", str(port)]
        options += ["--term", str(action.term), "--leader", leader]
        if replica is not None:
            options += ["--replica", str(replica)]
        if membership is None or membership.is_founder:
            options += ["--member", f"{host.keys.signer.verify_key}:{settings.name}"]
            options += ["--max-peers", str(settings.max_peers)]
        if membership is None:
            options.append(f"--name={settings.name}")  # may start with a dash
        else:
            options += ["--swarm", membership.swarm]
        if settings.discovery:
            options += ["--pairing-port", str(settings.pairing_port)]
        for address in host.addresses:
            options += ["--address", address]
        options += once
        once.clear()
        return options

    port = settings.coordinator_port
    led = membership is not None and (
        membership.leader == leader or (membership.is_founder and not membership.leader)
    )
    if membership is not None and led and port:
        # Peers know the port of the last run.
        port = int(membership.addresses[0].rpartition(":")[2])
    return CoordinatorProcess(arguments, port, home.logs, on_failing=on_failing)


def read_announcement(stream: BinaryIO) -> object | None:
    """The next announcement in the coordinator's output; other lines are skipped."""
    for line in iter(lambda: stream.readline(65536), b""):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=CoordinatorAnnouncement)
    return None
