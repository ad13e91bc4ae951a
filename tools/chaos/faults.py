"""Faults as context managers: entering begins a fault, leaving ends it.

A fault that ends by itself (a killed process that its PC restarts) does nothing on exit. Each
yields its target and may block briefly.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

from tools.chaos.hang import CannotHang, hang_thread
from tools.chaos.network import Network
from tools.chaos.pc import Pc, Role
from tools.chaos.swarm import Swarm

#: A slow link: seconds one way, and bytes/s.
SLOW_S, SLOW_RATE = 0.1, 1.25e6
#: Clock jump in seconds.
CLOCK_JUMP_S = 3 * 3600.0
#: Seconds of sampling to find the computing thread.
_LOOK_S = 0.5
#: Longest wait for a killed worker's replacement to serve, in seconds.
_REPLACED_S = 60.0


class CannotHarm(Exception):
    """The fault is impossible here."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target: part of one PC, or all PCs if ``pc`` is empty."""

    pc: str
    what: str


@dataclass(frozen=True, slots=True)
class Scene:
    """The swarm and the random generator that picks targets."""

    swarm: Swarm
    rng: random.Random

    def leader(self) -> Pc:
        """The PC with the coordinator."""
        leader = self.swarm.leader()
        if not leader.running:
            raise CannotHarm("no PC has a coordinator")
        return leader

    def other(self) -> Pc:
        """A PC without one."""
        leader = self.swarm.leader()
        found = [pc for pc in self.swarm.pcs if pc.running and pc is not leader]
        if not found:
            raise CannotHarm("no other PC runs")
        return self.rng.choice(found)

    def anyone(self) -> Pc:
        """Any PC."""
        return self.rng.choice([pc for pc in self.swarm.pcs if pc.running])

    def process(self, role: Role) -> tuple[Pc, psutil.Process]:
        """Pick a process of that role; a serving worker if there is one."""
        found = [(pc, p) for pc in self.swarm.pcs if pc.running for p in pc.processes(role)]
        if role == "worker":
            serving = set(self.swarm.stages().values())
            found = [pair for pair in found if pair[1].pid in serving] or found
        if not found:
            raise CannotHarm(f"no {role} runs")
        return self.rng.choice(found)

    @property
    def network(self) -> Network:
        """The network between PCs."""
        if self.swarm.network is None:
            raise CannotHarm("this swarm has no network that can be harmed")
        return self.swarm.network


#: A fault.
Harm = Callable[[Scene], AbstractContextManager[Target]]


def kill_process(role: Role) -> Harm:
    """Kill a process; its daemon starts another one."""

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        pc, process = scene.process(role)
        process.kill()
        yield Target(pc.name, f"{role} of {pc.name}")

    return harm


@contextmanager
def kill_worker_twice(scene: Scene) -> Iterator[Target]:
    """Kill a worker, and its replacement as soon as that serves."""
    pc, process = scene.process("worker")
    process.kill()
    deadline = time.monotonic() + _REPLACED_S
    while (pid := scene.swarm.stages().get(pc.name, process.pid)) == process.pid:
        if time.monotonic() > deadline:
            raise CannotHarm(f"no worker of {pc.name} serves again")
        time.sleep(0.05)
    psutil.Process(pid).kill()
    yield Target(pc.name, f"worker of {pc.name}, twice")


def kill_pc(choose: Callable[[Scene], Pc], *, at_once: bool = False) -> Harm:
    """Kill a daemon and with it its PC; ``at_once`` restarts it immediately."""

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        pc = choose(scene)
        pc.kill()
        if at_once:
            scene.swarm.start(pc)
        yield Target(pc.name, pc.name)
        if not pc.running:
            scene.swarm.start(pc)

    return harm


def freeze_process(role: Role) -> Harm:
    """Suspend a process (``SIGSTOP``) and resume it later."""

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        pc, process = scene.process(role)
        with _suspend_processes([process]):
            yield Target(pc.name, f"{role} of {pc.name}")

    return harm


def freeze_daemon(choose: Callable[[Scene], Pc]) -> Harm:
    """Suspend a daemon alone; its worker and coordinator keep running."""

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        pc = choose(scene)
        with _suspend_processes(pc.processes("daemon")):
            yield Target(pc.name, f"daemon of {pc.name}")

    return harm


def freeze_pc(choose: Callable[[Scene], Pc]) -> Harm:
    """Suspend all processes of a PC, as sleep does."""

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        pc = choose(scene)
        with _suspend_processes(pc.processes()):
            yield Target(pc.name, pc.name)

    return harm


def hang(role: Role, *, computing: bool = False) -> Harm:
    """Stop only a process's event loop, or only its computing thread."""

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        pc, process = scene.process(role)
        thread = _busiest_thread(process) if computing else process.pid
        what = "computing thread" if computing else "loop"
        with ExitStack() as stack:
            try:
                stack.enter_context(hang_thread(thread))
            except CannotHang as error:
                raise CannotHarm(str(error)) from None
            yield Target(pc.name, f"{what} of {pc.name}'s {role}")

    return harm


@contextmanager
def cut(scene: Scene) -> Iterator[Target]:
    """Cut a PC off from the others."""
    pc, network = scene.anyone(), scene.network
    network.cut(pc.name)
    try:
        yield Target(pc.name, pc.name)
    finally:
        network.mend(pc.name)


@contextmanager
def reset(scene: Scene) -> Iterator[Target]:
    """Break all connections between a PC and the others, once."""
    pc = scene.anyone()
    scene.network.reset(pc.name)
    yield Target(pc.name, pc.name)


@contextmanager
def slow(scene: Scene) -> Iterator[Target]:
    """Make a PC's network slow."""
    pc, network = scene.anyone(), scene.network
    network.slow(pc.name, SLOW_S, SLOW_RATE)
    try:
        yield Target(pc.name, pc.name)
    finally:
        network.mend(pc.name)


def full_disk(choose: Callable[[Scene], Pc]) -> Harm:
    """Stop a PC's files from growing, and kill a worker so that it must write.

    Linux only, by a limit on file sizes: programs get ``EFBIG``.
    """

    @contextmanager
    def harm(scene: Scene) -> Iterator[Target]:
        if not sys.platform.startswith("linux"):
            raise CannotHarm("file sizes can be limited from outside on Linux only")
        pc = choose(scene)
        _limit_files(pc, 0)
        try:
            owner, worker = scene.process("worker")
            worker.kill()
            yield Target(pc.name, f"{pc.name}, and a worker of {owner.name}")
        finally:
            _limit_files(pc, None)

    return harm


@contextmanager
def clock_jump(scene: Scene) -> Iterator[Target]:
    """Shift a PC's clock and restore it."""
    pc = scene.anyone()
    jump = scene.rng.choice((CLOCK_JUMP_S, -CLOCK_JUMP_S))
    pc.set_clock(jump)
    try:
        yield Target(pc.name, f"{pc.name} by {jump:+.0f} s")
    finally:
        pc.set_clock(0)


@contextmanager
def power_cut(scene: Scene) -> Iterator[Target]:
    """Kill all PCs at once, then restart them."""
    for pc in scene.swarm.pcs:
        pc.kill()
    yield Target("", "all")
    scene.swarm.start_all()


#: When a fault ends: ``itself``: at once; ``time``: after 1 to 30 s; ``streams``: when all streams
#: continue despite it.
Over = Literal["itself", "time", "streams"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault, and when it ends."""

    harm: Harm
    over: Over = "time"
    #: Needs the fault-injecting network.
    network: bool = False
    #: The PC's own endpoint cannot answer meanwhile.
    endpoint: bool = False


KINDS: dict[str, Kind] = {
    "kill-worker": Kind(kill_process("worker"), "itself"),
    "kill-worker-twice": Kind(kill_worker_twice, "itself"),
    "kill-coordinator": Kind(kill_process("coordinator"), "itself"),
    "kill-leader": Kind(kill_pc(Scene.leader), "streams"),
    "kill-other": Kind(kill_pc(Scene.other), "streams"),
    "restart-leader": Kind(kill_pc(Scene.leader, at_once=True), "itself"),
    "restart-other": Kind(kill_pc(Scene.other, at_once=True), "itself"),
    "freeze-worker": Kind(freeze_process("worker")),
    "freeze-coordinator": Kind(freeze_process("coordinator")),
    "freeze-leader-daemon": Kind(freeze_daemon(Scene.leader), endpoint=True),
    "freeze-other-daemon": Kind(freeze_daemon(Scene.other), endpoint=True),
    "freeze-leader": Kind(freeze_pc(Scene.leader), endpoint=True),
    "freeze-other": Kind(freeze_pc(Scene.other), endpoint=True),
    "hang-worker-loop": Kind(hang("worker")),
    "hang-worker-compute": Kind(hang("worker", computing=True)),
    "hang-daemon": Kind(hang("daemon"), endpoint=True),
    "hang-coordinator": Kind(hang("coordinator")),
    "disk-full-leader": Kind(full_disk(Scene.leader), "streams"),
    "disk-full-other": Kind(full_disk(Scene.other), "streams"),
    "clock-jump": Kind(clock_jump),
    "cut": Kind(cut, network=True, endpoint=True),
    "reset": Kind(reset, "itself", network=True),
    "slow": Kind(slow, network=True),
    "power-cut": Kind(power_cut),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault and its least duration."""

    kind: str
    seconds: float


def plan_faults(
    kinds: Sequence[str], rng: random.Random, shortest: float, longest: float
) -> Iterator[Fault]:
    """Yield faults endlessly in random order, each kind once before any repeats.

    Durations are log-uniform.
    """
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            seconds = shortest * (longest / shortest) ** rng.random()
            yield Fault(kind, seconds if KINDS[kind].over == "time" else 0.0)


@contextmanager
def _suspend_processes(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _busiest_thread(process: psutil.Process) -> int:
    """Find the busiest thread beside the main one."""

    def used() -> dict[int, float]:
        return {t.id: t.user_time + t.system_time for t in process.threads()}

    before = used()
    time.sleep(_LOOK_S)
    others = {id: now - before.get(id, now) for id, now in used().items() if id != process.pid}
    if not others:
        raise CannotHarm(f"process {process.pid} has one thread")
    return max(others, key=lambda id: others[id])


def _limit_files(pc: Pc, limit: int | None) -> None:
    for process in pc.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (hard if limit is None else limit, hard))
