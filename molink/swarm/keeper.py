"""Decides what this peer does about its assignments: fetch files, start, form and stop workers.

A plain object: what the coordinator asked for, what workers and transfers report, in; decisions
out. A *generation* numbers each attempt, so that news of a worker that is already being replaced
is told apart from that of its successor.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from molink.errors import InvariantError
from molink.facts.profile import UNKNOWN, Profile
from molink.wire.messages.control import (
    Assign,
    Form,
    StageFailed,
    StageLoaded,
    StageProfile,
    StageReady,
    WorkerState,
)
from molink.wire.messages.pipe import (
    Formed,
    FormRing,
    Loaded,
    MemberBlocked,
    NextStageLost,
    Start,
    WorkerFailed,
)

StageState = Literal["fetching", "loading", "loaded", "ready", "failed"]
#: States in which a worker process exists.
WITH_WORKER: frozenset[StageState] = frozenset({"loading", "loaded", "ready"})
#: Characters of a reason in a report to the coordinator: its field holds 1024.
MAX_REASON = 1000


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
    message: FormRing | Start


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker, or the transfer that was to precede it."""

    generation: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the coordinator."""

    message: StageLoaded | StageReady | StageFailed


Decision = Fetch | StartWorker | TellWorker | StopWorker | Tell
FromStage = Loaded | Formed | WorkerFailed | NextStageLost | MemberBlocked


@dataclass(slots=True)
class _KeptStage:
    assign: Assign
    generation: int
    state: StageState = "fetching"
    pid: int = 0
    loaded: Loaded | None = None
    #: Whether a worker that holds other layers is to change to these once their files are there.
    reused: bool = False
    #: Epoch of the last ring that the worker was told to form.
    forming: int = -1
    #: Why it failed; whether that is for want of memory beside another stage.
    reason: str = ""
    no_room: bool = False
    #: What its worker said of a neighbour in this epoch.
    neighbour: StageFailed | None = None
    #: What the coordinator said of this epoch's stages, by stage.
    profiles: dict[int, Profile] = field(default_factory=dict)


class Keeper:
    """All assignments of this peer, by pipeline."""

    def __init__(self) -> None:
        self._stages: dict[str, _KeptStage] = {}
        self._generations = 0
        self._story: deque[str] = deque(maxlen=64)

    # --- from the coordinator ---

    def assign(self, message: Assign) -> list[Decision]:
        """Take a new assignment, or go on with the worker that already holds those layers.

        One that holds others of the same weights will change to these; until their files are there
        it stays in the ring that it is in.
        """
        self._note(f"assign {message.pipeline} epoch {message.epoch} layers {message.layers}")
        stage = self._stages.get(message.pipeline)
        if stage is not None and message.epoch < stage.assign.epoch:
            return []
        if stage is not None and stage.state != "failed" and _same_worker(stage.assign, message):
            if stage.state == "ready" and message.epoch == stage.assign.epoch:
                return [*_repeated(stage)]
            stage.assign, stage.neighbour, stage.profiles = message, None, {}
            if stage.loaded is None:
                return []
            stage.state = "loaded"
            return [Tell(_stage_loaded(stage))]
        if stage is not None and stage.loaded is not None and _same_weights(stage.assign, message):
            kept = _KeptStage(message, stage.generation, pid=stage.pid, reused=True)
            self._stages[message.pipeline] = kept
            return [Fetch(kept.generation, message)]
        decisions: list[Decision] = []
        if stage is not None:
            decisions.append(StopWorker(stage.generation))
        self._generations += 1
        self._stages[message.pipeline] = _KeptStage(message, self._generations)
        return [*decisions, Fetch(self._generations, message)]

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

    def failed(self, generation: int, reason: str, *, no_room: bool = False) -> list[Decision]:
        """The files can't be had, or the worker can't be started or has exited.

        ``no_room``: the device has too little memory for it beside another stage.
        """
        stage = self._find(generation)
        if stage is None or stage.state == "failed":
            return []
        self._note(f"generation {generation} failed: {reason}")
        stage.state, stage.loaded, stage.reason = "failed", None, reason
        stage.no_room = no_room
        failed = _stage_failed(stage.assign, reason, no_room=no_room)
        return [StopWorker(generation), Tell(failed)]

    def worker_said(self, generation: int, message: FromStage) -> list[Decision]:
        """A worker reports."""
        stage = self._find(generation)
        if stage is None or stage.state not in WITH_WORKER:
            return []
        self._note(f"generation {generation}: {type(message).__name__}")
        match message:
            case Loaded():
                stage.state, stage.loaded = "loaded", message
                return [Tell(_stage_loaded(stage))]
            case Formed():
                return self._formed(stage, message.epoch)
            case WorkerFailed():
                return self.failed(generation, f"{message.kind}: {message.message}")
            case NextStageLost():
                if message.epoch != stage.assign.epoch:
                    return []
                stage.neighbour = _stage_failed(stage.assign, message.reason, next_lost=True)
                return [Tell(stage.neighbour)]
            case MemberBlocked():
                if not message.previous or message.epoch != stage.assign.epoch:
                    return []
                stage.neighbour = _stage_failed(stage.assign, message.reason, previous_blocked=True)
                return [Tell(stage.neighbour)]

    def _formed(self, stage: _KeptStage, epoch: int) -> list[Decision]:
        if epoch != stage.assign.epoch or epoch != stage.forming:
            return []
        stage.state = "ready"
        return [Tell(_stage_ready(stage.assign))]

    # --- state ---

    def states(self, transfers: Mapping[int, tuple[int, int]]) -> tuple[WorkerState, ...]:
        """All assignments, as the report to the coordinator shows them.

        ``transfers`` has, by generation, the bytes that are here and those that there are in all.
        """
        return tuple(
            WorkerState(
                pid=stage.pid,
                pipeline=pipeline,
                stage=stage.assign.stage,
                layers=stage.assign.layers,
                state=stage.state,
                epoch=stage.assign.epoch,
                done=transfers.get(stage.generation, (0, 0))[0],
                total=transfers.get(stage.generation, (0, 0))[1],
            )
            for pipeline, stage in self._stages.items()
        )

    def describe(self) -> str:
        """All assignments in one line, for a person."""
        return ", ".join(_describe(stage) for stage in self._stages.values()) or "no stage"

    def repeat(self) -> list[Tell]:
        """What to tell again to a coordinator whose connection was lost in between."""
        return [tell for stage in self._stages.values() for tell in _repeated(stage)]

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

    def _find(self, generation: int) -> _KeptStage | None:
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


def _describe(stage: _KeptStage) -> str:
    first, last = stage.assign.layers
    reason = f": {stage.reason}" if stage.state == "failed" else ""
    return f"stage {stage.assign.stage} (layers {first}:{last}) {stage.state}{reason}"


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
    )


def _stage_loaded(stage: _KeptStage) -> StageLoaded:
    assert stage.loaded is not None
    return StageLoaded(
        pipeline=stage.assign.pipeline,
        epoch=stage.assign.epoch,
        stage=stage.assign.stage,
        port=stage.loaded.port,
        max_blocks=stage.loaded.max_blocks,
        profile=stage.loaded.profile,
    )


def _stage_ready(assign: Assign) -> StageReady:
    return StageReady(pipeline=assign.pipeline, epoch=assign.epoch, stage=assign.stage)


def _repeated(stage: _KeptStage) -> list[Tell]:
    """All that the coordinator has been told of a stage's present state."""
    told: list[Tell] = []
    if stage.loaded is not None:
        told.append(Tell(_stage_loaded(stage)))
    if stage.state == "ready":
        told.append(Tell(_stage_ready(stage.assign)))
    if stage.state == "failed":
        told.append(Tell(_stage_failed(stage.assign, stage.reason, no_room=stage.no_room)))
    elif stage.neighbour is not None:
        told.append(Tell(stage.neighbour))
    return told


def _stage_failed(
    assign: Assign,
    reason: str,
    *,
    next_lost: bool = False,
    previous_blocked: bool = False,
    no_room: bool = False,
) -> StageFailed:
    return StageFailed(
        pipeline=assign.pipeline,
        epoch=assign.epoch,
        stage=assign.stage,
        reason=reason[:MAX_REASON],
        next_lost=next_lost,
        previous_blocked=previous_blocked,
        no_room=no_room,
    )
