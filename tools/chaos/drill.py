"""Inject faults one after another under load and collect results."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field

from tools.chaos import checks, phases
from tools.chaos.faults import KINDS, CannotHarm, Fault, Scene, Target
from tools.chaos.streams import Answer, Load
from tools.chaos.swarm import Swarm
from tools.chaos.usage import measure_usage_by_role

#: Pieces that every stream must receive before a fault, and after it.
CALM, AGAIN = 10, 5
#: Longest wait for all streams to continue after a fault, in seconds.
RECOVERY_S = 120.0
#: Longest wait for all PCs to hold layers again before the next fault, in seconds.
WHOLE_S = 20.0
#: Allowed growth of descriptors per role.
SLACK = 12


@dataclass(slots=True)
class Result:
    """One fault; times are monotonic seconds."""

    fault: Fault
    #: The target, or why the fault was skipped.
    target: str
    skipped: bool = False
    begun: float = 0.0
    #: When the fault ended.
    mended: float = 0.0
    #: When all streams continued; ``None`` if one did not.
    recovered: float | None = None
    #: When all PCs held layers again; ``None`` if not within :data:`WHOLE_S`.
    whole: float | None = None
    #: Pauses of streams whose endpoint could answer, in seconds.
    pauses: list[float] = field(default_factory=list)
    #: Pauses of streams whose own endpoint could not answer, in seconds.
    asked: list[float] = field(default_factory=list)
    #: Seconds of each recovery phase, per reporting PC.
    phases: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Verdict:
    """Results of a drill."""

    results: list[Result]
    answers: list[Answer]
    #: Longest pause of each stream before the first fault, in seconds.
    calm: list[float]
    #: Descriptions of everything that went wrong.
    troubles: list[str]

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not self.troubles


async def run_drill(
    swarm: Swarm,
    load: Load,
    faults: Iterable[Fault],
    seed: int = 0,
    *,
    tell: Callable[[Result], None] = lambda _: None,
    whole_s: float = WHOLE_S,
    rest_s: float = 0.0,
) -> Verdict:
    """Inject ``faults`` into a swarm under ``load``, end the load and check invariants.

    ``tell`` receives each finished fault. Standby workers start during the ``rest_s`` after each
    fault, in seconds. ``whole_s``: see :data:`WHOLE_S`.
    """
    scene = Scene(swarm, random.Random(seed))
    begun = time.monotonic()
    troubles: list[str] = []
    if not await load.advance(CALM, RECOVERY_S):
        troubles.append("streams stalled before any fault")
    calm = [slot.pause(begun, time.monotonic()) for slot in load.slots]
    await checks.wait_for_standby_workers(swarm.pcs, WHOLE_S)
    before = measure_usage_by_role(swarm.pcs)
    results: list[Result] = []
    for fault in faults:
        results.append(await _inject_fault(scene, load, fault))
        if not results[-1].skipped and results[-1].recovered is None:
            troubles.append(f"{fault.kind}: not all streams continued within {RECOVERY_S:.0f} s")
            break
        if not results[-1].skipped:
            await _await_recovery(swarm, fault, troubles)
            results[-1].whole = await _await_stages(swarm, whole_s)
            await asyncio.sleep(rest_s)
        tell(results[-1])
        await load.advance(CALM, RECOVERY_S)
    await load.finish()
    troubles += list_troubles(load.answers, results)
    troubles += await checks.find_busy_gauges(swarm)
    troubles += checks.find_stray_processes(swarm)
    troubles += await checks.wait_until_settled(swarm, before, SLACK)
    for pc in swarm.pcs:
        troubles += checks.find_aborts(pc)
    return Verdict(results, load.answers, calm, troubles)


async def _inject_fault(scene: Scene, load: Load, fault: Fault) -> Result:
    """Inject one fault and wait until all streams continue."""
    kind = KINDS[fault.kind]
    deaths = [slot.pc.deaths for slot in load.slots]
    asked = [slot.pc for slot in load.slots]
    shown = await phases.read_phases(scene.swarm)
    begun, wall = time.monotonic(), time.time()
    try:
        async with _enter_in_thread(kind.harm(scene)) as target:
            result = Result(fault, target.what, begun=begun)
            await asyncio.sleep(fault.seconds)
            if kind.over == "streams":
                await load.advance(AGAIN, RECOVERY_S)
    except CannotHarm as error:
        return Result(fault, str(error), skipped=True)
    result.mended = time.monotonic()
    scene.swarm.start_all()  # crashes are reported at the end
    if await load.advance(AGAIN, RECOVERY_S):
        result.recovered = time.monotonic()
        result.phases = phases.compute_phases(shown, await phases.read_phases(scene.swarm), wall)
    for slot, pc, count in zip(load.slots, asked, deaths, strict=True):
        if pc.deaths == count:
            # The slot may ask another PC now.
            of_asked = kind.endpoint and target.pc in (pc.name, slot.pc.name)
            (result.asked if of_asked else result.pauses).append(
                slot.pause(begun, time.monotonic())
            )
    return result


async def _await_recovery(swarm: Swarm, fault: Fault, troubles: list[str]) -> None:
    """Wait until all PCs can serve, so that faults do not overlap."""
    try:
        await swarm.ready(RECOVERY_S)
    except TimeoutError as error:
        troubles.append(f"after {fault.kind}: {error}")


async def _await_stages(swarm: Swarm, timeout: float) -> float | None:
    """Wait until all PCs hold layers; ``None`` on timeout."""
    deadline = time.monotonic() + timeout
    while len(await asyncio.to_thread(swarm.stages)) < len(swarm.pcs):
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(0.2)
    return time.monotonic()


@asynccontextmanager
async def _enter_in_thread(harm: AbstractContextManager[Target]) -> AsyncIterator[Target]:
    """Enter and leave a fault in a thread, so that streams are read meanwhile."""
    target = await asyncio.to_thread(harm.__enter__)
    try:
        yield target
    finally:
        await asyncio.to_thread(harm.__exit__, None, None, None)


def list_troubles(answers: Sequence[Answer], results: Sequence[Result]) -> list[str]:
    """Describe lost and changed answers with the fault before them.

    A wrong piece is listed with all faults during its answer.
    """
    counts: Counter[str] = Counter()
    for answer in answers:
        if answer.end in ("lost", "changed"):
            earlier = [r for r in results if not r.skipped and r.begun <= answer.ended]
            when = f"{earlier[-1].fault.kind} ({earlier[-1].target})" if earlier else "no fault"
            text = f"{when}: at {answer.pc}, {answer.end}: {answer.trouble}"
            counts[text + _lived_through(answer, earlier)] += 1
    return [f"{text} ({count} times)" for text, count in counts.items()]


def _lived_through(answer: Answer, results: Sequence[Result]) -> str:
    """Describe the faults during an answer, relative to its wrong piece."""
    until = ((r, float("inf") if r.recovered is None else r.recovered) for r in results)
    faults = [
        f"{r.fault.kind} ({r.target}) {answer.wrong_at - r.begun:+.1f} s"
        for r, recovered in until
        if answer.wrong_at and recovered > answer.begun
    ]
    return f"; after {', '.join(faults)}" if faults else ""
