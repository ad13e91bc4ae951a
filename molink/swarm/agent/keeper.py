"""Decides what this peer does about its assignments: fetch files, start, form and stop workers.

A plain object: what the coordinator asked for, what workers and transfers report, in; decisions
out. A *generation* numbers each attempt, so that news of a worker that is already being replaced
is told apart from that of its successor.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from molink.errors import InvariantError
from molink.facts.profile import UNKNOWN, Profile
from molink.swarm.agent.kept_stage import WITH_WORKER, KeptStage
from molink.swarm.agent.pulse import HURRY, PATIENCE, Pulse
from molink.swarm.running_time import RunningTime
from molink.wire.messages.instructions import Assign, Form, StageProfile
from molink.wire.messages.pipe import (
    Formed,
    FormRing,
    Loaded,
    MemberBlocked,
    NextStageLost,
    Ping,
    Pong,
    Start,
    WorkerFailed,
)
from molink.wire.messages.reports import StageFailed, StageLoaded, StageReady, WorkerState


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the files that this assignment needs."""

    generation: int
    assign: Assign


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker: its files are there."""

    generation: int
    start: Start


@dataclass(frozen=True, slots=True)
class TellWorker:
    """Hand a message to a worker: its next ring, or the other layers that it is to hold."""

    generation: int
    message: FormRing | Start | Ping


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker, or the transfer that was to precede it.

    ``kill`` one that doesn't answer: asking it to end would take as long.
    """

    generation: int
    kill: bool = False


@dataclass(frozen=True, slots=True)
class TellCoordinator:
    """Tell the coordinator."""

    message: StageLoaded | StageReady | StageFailed


Decision = Fetch | StartWorker | TellWorker | StopWorker | TellCoordinator
FromStage = Loaded | Formed | Pong | WorkerFailed | NextStageLost | MemberBlocked


class Keeper:
    """All assignments of this peer, by pipeline."""

    def __init__(self) -> None:
        self._stages: dict[str, KeptStage] = {}
        self._generations = 0
        self._running = RunningTime(0.0)
        #: When :meth:`watch` was called last.
        self._now = 0.0
        self._story: deque[str] = deque(maxlen=64)

    # --- from the coordinator ---

    def assign(self, message: Assign) -> list[Decision]:
        """Take a new assignment, or go on with the worker that already holds those layers.

        One that holds others of the same weights will change to these; until their files are there
        it stays in the ring that it is in. A worker that is used again has to answer before; if it
        doesn't, another one follows on it.
        """
        self._note(f"assign {message.pipeline} epoch {message.epoch} layers {message.layers}")
        stage = self._stages.get(message.pipeline)
        if stage is not None and message.epoch < stage.assign.epoch:
            return []
        if stage is not None and stage.state != "failed" and _same_worker(stage.assign, message):
            if stage.state == "ready" and message.epoch == stage.assign.epoch:
                return [TellCoordinator(each) for each in stage.repeated()]
            stage.assign, stage.neighbour, stage.profiles = message, None, {}
            if stage.loaded is None:
                return []
            stage.state = "loaded"
            return self._make_sure(stage)
        if stage is not None and stage.loaded is not None and _same_weights(stage.assign, message):
            kept = KeptStage(message, stage.generation, stage.pulse, pid=stage.pid, reused=True)
            self._stages[message.pipeline] = kept
            return [*self._make_sure(kept), Fetch(kept.generation, message)]
        if stage is not None:
            return self._follow_on(stage, message)
        return [self._begin(message)]

    def profile(self, message: StageProfile) -> None:
        """Keep what the head has to know of a stage until the ring is formed."""
        stage = self._stages.get(message.pipeline)
        if stage is not None and message.epoch == stage.assign.epoch:
            stage.profiles[message.stage] = message.profile

    def form(self, message: Form) -> list[Decision]:
        """Have the worker take its place in the ring of an epoch."""
        self._note(f"form {message.pipeline} epoch {message.epoch}")
        stage = self._stages.get(message.pipeline)
        if stage is None or stage.loaded is None or message.epoch != stage.assign.epoch:
            return []
        stage.forming, stage.neighbour = message.epoch, None
        ring = FormRing(
            epoch=message.epoch,
            ring=message.ring,
            blocks=message.blocks,
            micro_batches=message.micro_batches,
            profiles=_in_order(stage.profiles, len(message.ring)),
        )
        return [TellWorker(stage.generation, ring)]

    def unassign(self, pipeline: str) -> list[Decision]:
        """Give up a pipeline."""
        self._note(f"unassign {pipeline}")
        stage = self._stages.pop(pipeline, None)
        return [StopWorker(stage.generation)] if stage is not None else []

    def _begin(self, message: Assign) -> Fetch:
        """A worker of its own for an assignment."""
        self._generations += 1
        kept = KeptStage(message, self._generations, Pulse(self._now))
        self._stages[message.pipeline] = kept
        return Fetch(kept.generation, message)

    def _follow_on(
        self, stage: KeptStage, message: Assign, *, kill: bool = False
    ) -> list[Decision]:
        """Another worker in place of that of ``stage``."""
        return [StopWorker(stage.generation, kill=kill), self._begin(message)]

    # --- whether workers live ---

    def watch(self, now: float) -> list[Decision]:
        """Ask workers whether they live, and end those that don't answer.

        To be called about twice a second, with the time in seconds of a monotonic clock.
        """
        now = self._now = self._running.at(now)
        decisions: list[Decision] = []
        for stage in list(self._stages.values()):
            if stage.loaded is None and not stage.unsure:
                continue
            silent = stage.pulse.silent(now)
            if silent >= (HURRY if stage.unsure else PATIENCE):
                decisions += self._lifeless(stage, f"has not answered for {silent:.1f} s")
            elif stage.pulse.due(now):
                stage.pulse.ask(now)
                decisions.append(TellWorker(stage.generation, Ping()))
        return decisions

    def _make_sure(self, stage: KeptStage) -> list[Decision]:
        """Have the worker answer before anything relies on it."""
        stage.unsure = True
        return [TellWorker(stage.generation, Ping())] if stage.pulse.ask(self._now) else []

    def _answered(self, stage: KeptStage, *, stuck: bool) -> list[Decision]:
        stage.pulse.answered(self._now)
        if stuck:
            return self._lifeless(stage, "does not get on with its computation")
        if not stage.unsure:
            return []
        stage.unsure = False
        return [TellCoordinator(stage.now_loaded())] if stage.loaded is not None else []

    def _lifeless(self, stage: KeptStage, what: str) -> list[Decision]:
        """A worker is there, but of no use."""
        self._note(f"generation {stage.generation} {what}")
        if stage.unsure:
            return self._follow_on(stage, stage.assign, kill=True)
        return self.failed(stage.generation, f"the worker {what}", kill=True)

    # --- from transfers and workers ---

    def fetched(self, generation: int, start: Start) -> list[Decision]:
        """The files of an assignment are there, and the worker's first message is made."""
        stage = self._find(generation)
        if stage is None or stage.state != "fetching":
            return []
        stage.state = "loading"
        if stage.reused:
            return [TellWorker(generation, start)]
        return [StartWorker(generation, start)]

    def started(self, generation: int, pid: int) -> None:
        """A worker process exists."""
        stage = self._find(generation)
        if stage is not None:
            stage.pid = pid

    def failed(
        self,
        generation: int,
        reason: str,
        *,
        no_room: bool = False,
        no_files: bool = False,
        kill: bool = False,
    ) -> list[Decision]:
        """The files can't be had, or the worker can't be started, has exited or must be killed.

        ``no_room``: the device has too little memory for it beside another stage. ``no_files``: no
        PC that is there has some of its files.
        """
        stage = self._find(generation)
        if stage is None or stage.state == "failed":
            return []
        self._note(f"generation {generation} failed: {reason}")
        stage.state, stage.loaded, stage.reason = "failed", None, reason
        stage.no_room, stage.no_files, stage.unsure = no_room, no_files, False
        failed = stage.now_failed(reason, no_room=no_room, no_files=no_files)
        return [StopWorker(generation, kill=kill), TellCoordinator(failed)]

    def worker_said(self, generation: int, message: FromStage) -> list[Decision]:
        """A worker reports."""
        stage = self._find(generation)
        if stage is None:
            return []
        if isinstance(message, Pong):
            return self._answered(stage, stuck=message.stuck)
        if stage.state not in WITH_WORKER:
            return []
        self._note(f"generation {generation}: {type(message).__name__}")
        match message:
            case Loaded():
                stage.state, stage.loaded = "loaded", message
                return [TellCoordinator(stage.now_loaded())]
            case Formed():
                return self._formed(stage, message.epoch)
            case WorkerFailed():
                return self.failed(generation, f"{message.kind}: {message.message}")
            case NextStageLost():
                if message.epoch != stage.assign.epoch:
                    return []
                stage.neighbour = stage.now_failed(message.reason, next_lost=True)
                return [TellCoordinator(stage.neighbour)]
            case MemberBlocked():
                if not message.previous or message.epoch != stage.assign.epoch:
                    return []
                stage.neighbour = stage.now_failed(message.reason, previous_blocked=True)
                return [TellCoordinator(stage.neighbour)]

    def _formed(self, stage: KeptStage, epoch: int) -> list[Decision]:
        if epoch != stage.assign.epoch or epoch != stage.forming:
            return []
        stage.state = "ready"
        return [TellCoordinator(stage.now_ready())]

    # --- state ---

    def states(
        self, transfers: Mapping[int, tuple[int, int, int]], paces: Mapping[str, float]
    ) -> tuple[WorkerState, ...]:
        """All assignments, as the report to the coordinator shows them.

        ``transfers`` has, by generation, the bytes that are here, those that there are in all, and
        how many come in a second; ``paces``, by pipeline, how many times as long its steps take as
        they should.
        """
        none = 0, 0, 0
        return tuple(
            WorkerState(
                pid=stage.pid,
                pipeline=pipeline,
                stage=stage.assign.stage,
                layers=stage.assign.layers,
                state=stage.state,
                epoch=stage.assign.epoch,
                done=transfers.get(stage.generation, none)[0],
                total=transfers.get(stage.generation, none)[1],
                rate=transfers.get(stage.generation, none)[2],
                pace=paces.get(pipeline, 0.0),
            )
            for pipeline, stage in self._stages.items()
        )

    def describe(self) -> str:
        """All assignments in one line, for a person."""
        return ", ".join(stage.describe() for stage in self._stages.values()) or "no stage"

    def repeat(self) -> list[TellCoordinator]:
        """What to tell again to a coordinator whose connection was lost in between."""
        return [
            TellCoordinator(each) for stage in self._stages.values() for each in stage.repeated()
        ]

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        generations = [stage.generation for stage in self._stages.values()]
        if len(set(generations)) != len(generations):
            raise InvariantError("two pipelines share a worker", self._story)
        for pipeline, stage in self._stages.items():
            if (stage.loaded is None) == (stage.state in ("loaded", "ready")):
                raise InvariantError(f"{pipeline} is {stage.state}, loaded or not", self._story)
            if stage.state == "ready" and stage.forming != stage.assign.epoch:
                raise InvariantError(f"{pipeline} is ready in another epoch", self._story)

    def _find(self, generation: int) -> KeptStage | None:
        for stage in self._stages.values():
            if stage.generation == generation:
                return stage
        return None

    def _note(self, text: str) -> None:
        self._story.append(text)


def _in_order(profiles: Mapping[int, Profile], stages: int) -> tuple[Profile, ...]:
    if not profiles:
        return ()
    return tuple(profiles.get(stage, UNKNOWN) for stage in range(stages))


def _same_weights(old: Assign, new: Assign) -> bool:
    """Whether layers that both have are the same in memory."""
    kept = (old.model, old.root, old.dtype, old.quantize)
    return kept == (new.model, new.root, new.dtype, new.quantize)


def _same_worker(old: Assign, new: Assign) -> bool:
    """Whether the worker of ``old`` can serve ``new`` without loading anything."""
    return _held(old) == _held(new)


def _held(assign: Assign) -> tuple[object, ...]:
    """What a worker was started with."""
    return (
        assign.layers,
        assign.stage,
        assign.stages,
        assign.model,
        assign.root,
        assign.dtype,
        assign.quantize,
        assign.block_size,
        assign.context,
    )


def tells_more(decision: Decision) -> bool:
    """Whether a decision changes something that a report shows; a question to a worker doesn't."""
    return not (isinstance(decision, TellWorker) and isinstance(decision.message, Ping))
