"""A swarm of several daemons on this PC, as real processes with separate homes."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from molink.errors import MolinkError, UsageError, WorkerError
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Quantize
from molink.files import retry_while_busy
from molink.stage.diagnostics.profile_cache import prune_profiles
from molink.wire.sockets.secrets import private_folder
from molinkd.child_process import ChildProcess, exit_text
from molinkd.peer.home import MAX_DEMOS, Home, HomeLock, RunFile, copy_measurements
from molinkd.peer.launch import (
    DAEMON_COMMAND,
    AnyDaemonEvent,
    DaemonEndedEvent,
    DaemonStartedEvent,
    Launch,
    ModelReadinessChangedEvent,
    SwarmOpenedEvent,
    read_event,
)
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)

GRACE_S = 15.0
#: How long an earlier demo's daemon may keep files open, in seconds.
_DELETE_TIMEOUT_S = 20.0


@dataclass(slots=True)
class DemoPeer:
    """One daemon of a demo, and its state by its events."""

    number: int
    child: ChildProcess
    endpoint: str = ""
    control_port: int = 0
    is_ready: bool = False
    token: str = ""
    ended: DaemonEndedEvent | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class DemoSwarm:
    """Starts and stops the daemons of a demo."""

    def __init__(
        self,
        under: Home,
        count: int,
        dtype: DTypeChoice,
        model: str | None,
        on_event: Callable[[int, AnyDaemonEvent], None],
        quantize: Quantize = "none",
    ) -> None:
        """``under`` contains the demo's own home. ``on_event`` gets the peer's number."""
        self._parent_home = under
        self._count = count
        self._dtype: DTypeChoice = dtype
        self._quantize: Quantize = quantize
        self._model = model
        self._on_event = on_event
        self._lock: HomeLock | None = None
        self._closing = False
        self.home = under
        self.peers: list[DemoPeer] = []

    async def start_peers(self) -> None:
        """Start all daemons and wait until all APIs are ready.

        Raises:
            MolinkError: A daemon could not start.
        """
        self.home, self._lock = acquire_demo_home(self._parent_home)
        first = await self._launch_peer(1, None)
        await self._wait_for(first, lambda: bool(first.token or self._count == 1))
        copy_measurements(self.home.demo_peer(1), self.home)
        others = [await self._launch_peer(n, first.token) for n in range(2, self._count + 1)]
        for peer in (first, *others):
            await self._wait_for(peer, partial(getattr, peer, "is_ready"))
        self._save_measurements()
        endpoints = tuple(peer.endpoint for peer in self.peers)
        note = RunFile.of_this_process(first.control_port, first.endpoint, endpoints)
        note.save_file(self.home.run_file)

    async def close(self) -> None:
        """Stop all daemons."""
        self._closing = True
        if self._lock is not None:
            retry_while_busy(partial(self.home.run_file.unlink, missing_ok=True))
        await asyncio.gather(*(peer.child.stop(GRACE_S) for peer in self.peers))
        if self._lock is not None:
            await asyncio.to_thread(self._delete_models)
            self._lock.release()

    async def _launch_peer(self, number: int, token: str | None) -> DemoPeer:
        home = self.home.demo_peer(number)
        if home.root.exists():
            await asyncio.to_thread(_delete, home)
        private_folder(home.root)
        copy_measurements(self.home, home)
        launch = Launch(
            home=str(home.root),
            settings=self._peer_settings(number),
            role="up" if token is None else "join",
            model=self._model if token is None else None,
            token=token,
            invite=self._count - 1 if token is None else 0,
        )
        peer = DemoPeer(number, self._make_child(number))
        peer.child.start()
        peer.child.send(msgspec.json.encode(launch) + b"\n")
        self.peers.append(peer)
        return peer

    def _peer_settings(self, number: int) -> Settings:
        return Settings(
            name=f"demo-{number}",
            host="127.0.0.1",
            api_port=0,
            coordinator_port=0,
            control_port=0,
            worker_ports=(0, 0),
            device="cpu",
            stages_per_host=self._count,
            discovery=False,
            min_peers=self._count,
            dtype=self._dtype,
            quantize=self._quantize,
            # Two for each peer would take a second of CPU and 180 MB each, beside the first answer.
            standby_worker=False,
        )

    def _make_child(self, number: int) -> ChildProcess:
        return ChildProcess(
            f"demo-{number}",
            DAEMON_COMMAND,
            reader=read_event,
            on_message=lambda event: self._on_peer_event(number, event),
            on_exit=lambda code: self._on_exit(number, code),
            log_file=self.home.root / f"peer-{number}.log",
        )

    def _delete_models(self) -> None:
        """Free the disk space that the peers' copies of the model take; logs stay."""
        for home in self.home.demo_peers():
            for folder in (home.models, home.unpacked):
                shutil.rmtree(folder, ignore_errors=True)

    def _save_measurements(self) -> None:
        """Keep the device measurements for the next demo."""
        for peer in self.peers:
            copy_measurements(self.home.demo_peer(peer.number), self.home)
        prune_profiles(self.home.profiles)

    async def _wait_for(self, peer: DemoPeer, met: Callable[[], bool]) -> None:
        while not met():
            for one in self.peers:
                if one.ended is not None:
                    raise _error_of(one.number, one.ended)
            peer.changed.clear()
            await peer.changed.wait()

    def _on_peer_event(self, number: int, event: object) -> None:
        assert isinstance(event, AnyDaemonEvent)
        peer = self.peers[number - 1]
        match event:
            case DaemonStartedEvent():
                peer.endpoint, peer.control_port = event.endpoint, event.control_port
            case SwarmOpenedEvent():
                peer.token = event.token
            case ModelReadinessChangedEvent():
                peer.is_ready = event.ready
            case DaemonEndedEvent():
                peer.ended = event
        self._wake_waiters()
        if not self._closing:
            self._on_event(number, event)

    def _on_exit(self, number: int, code: int) -> None:
        peer = self.peers[number - 1]
        if self._closing:
            return
        if peer.ended is None:
            last = (peer.child.tail.splitlines() or [""])[-1]
            peer.ended = DaemonEndedEvent(code=1, text=f"it {exit_text(code)}. {last}".strip())
        self._wake_waiters()
        self._on_event(number, peer.ended)

    def _wake_waiters(self) -> None:
        for peer in self.peers:
            peer.changed.set()


def acquire_demo_home(under: Home) -> tuple[Home, HomeLock]:
    """The first unused demo home, locked.

    Raises:
        UsageError: Too many demos run.
    """
    private_folder(under.root)  # may contain a swarm's keys later
    for home in under.demo_homes():
        private_folder(home.root)
        lock = HomeLock(home)
        if lock.try_acquire():
            retry_while_busy(partial(home.run_file.unlink, missing_ok=True))
            return home, lock
    raise UsageError(f"{MAX_DEMOS} demos are running under {under.root}: stop one with Ctrl-C")


def _delete(home: Home) -> None:
    """Delete the home of an earlier demo's daemon, which may still be exiting."""
    try:
        retry_while_busy(partial(shutil.rmtree, home.root), _DELETE_TIMEOUT_S)
    except OSError as error:
        raise UsageError(
            f"can't delete {home.root}: {error}. Close programs that use it, or delete it yourself."
        ) from error


def _error_of(number: int, ended: DaemonEndedEvent) -> MolinkError:
    kind = UsageError if ended.code == UsageError.exit_code else WorkerError
    return kind(f"demo peer {number} exited: {ended.text}")
