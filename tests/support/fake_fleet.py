"""A fake swarm: peers that report, and a fleet that receives the events."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from molink.facts.device import Device
from molink.facts.model import ModelFacts
from molink.facts.profile import Profile
from molink.swarm.controller.events import (
    AnnouncePeerAction,
    CommitPipelineAction,
    DesiredStateChangedEvent,
    MemberAddedEvent,
    PeerReportedEvent,
    SendMessageAction,
    StageReportedEvent,
    TimePassedEvent,
)
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.controller.records import DesiredModel, MemberRecord, PipelineRecord
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    PeerInfo,
    Prefetch,
    Route,
    Welcome,
)
from molink.wire.messages.peer_reports import (
    PeerReport,
    PrefetchState,
    StageFailed,
    StageLoaded,
    StageReady,
    WorkerState,
)

GB = 10**9
FACTS = ModelFacts(
    name="toy",
    layers=6,
    layer_bytes=GB,
    first_bytes=0,
    last_bytes=0,
    kv_bytes=0,
    max_model_len=4096,
)
#: Too little data for a scheduler's decision.
QUICK = Profile(decode=((1, 0.01),))
BLOCKS = {"a": 100, "b": 80, "c": 90}


def key(name: str) -> str:
    return name * 40


def member(name: str, **changes: Any) -> MemberRecord:
    return MemberRecord(name, key(name), name.upper(), **changes)


def report(
    name: str,
    *workers: WorkerState,
    stage: str = "auto",
    memory: int = 100 * GB,
    pid: int = 1,
    models: tuple[str, ...] = (),
    prefetched: PrefetchState | None = None,
    block_size: int = 1,
    pc: str = "",
    routes: tuple[tuple[str, int, bool], ...] | None = None,
    device: Device | None = None,
) -> PeerReport:
    cpu = Device(kind="cpu", name="CPU", memory=memory, read_rate=10e9, block_size=block_size)
    return PeerReport(
        name=name.upper(),
        version="1",
        addresses=(f"10.0.0.{ord(name)}",),
        control_port=5467,
        api_address="http://127.0.0.1:5465",
        daemon_pid=pid,
        stage=stage,
        device=device or cpu,
        models=models or (("toy",) if name == "a" else ()),
        workers=workers,
        prefetch=prefetched,
        primary_peer=pc,
        routes=routes,
    )


def worker(
    state: str,
    epoch: int,
    stage: int,
    layers: tuple[int, int],
    pipeline: str = "p1",
    done: int = 0,
) -> WorkerState:
    return WorkerState(
        pid=1, pipeline=pipeline, stage=stage, layers=layers, state=state, epoch=epoch, done=done
    )


def by_peer(sent: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Messages by receiver: only those of one connection have an order."""
    found: dict[str, list[Any]] = {}
    for peer, message in sent:
        found.setdefault(peer, []).append(message)
    return found


class FakeFleet:
    """Drives a fleet and records its messages."""

    def __init__(
        self,
        *names: str,
        min_peers: int = 1,
        now: float = 100.0,
        desired: DesiredModel | None = None,
        pipeline: PipelineRecord | None = None,
        lost_peer: str = "",
        **restored: tuple[int, int],
    ) -> None:
        self.now = now
        self.members = [member(name) for name in names]
        models = (desired,) if desired is not None else ()
        pipelines = (pipeline,) if pipeline is not None else ()
        self.fleet = Fleet(
            "s1",
            self.members,
            self.now,
            models=models,
            pipelines=pipelines,
            lost_peer=lost_peer,
            **restored,
        )
        self.min_peers = min_peers
        self.decisions = []
        self.committed = []
        self._routes = {}

    @property
    def reconciler(self) -> Reconciler:
        """The reconciler of the first model."""
        return self.fleet.deployments[0]

    def handle_event(
        self, event: Any
    ) -> list[AnnouncePeerAction | CommitPipelineAction | SendMessageAction] | None:
        decisions = self.fleet.handle(event, self.now)
        self.fleet.validate()
        live = self.fleet.registry.sessions
        assert all(d.peer in live for d in decisions if isinstance(d, SendMessageAction))
        self.decisions += decisions
        self.committed += [d.pipeline for d in decisions if isinstance(d, CommitPipelineAction)]
        return decisions

    def pop_messages(self, *, about_members: bool = False, with_reasons: bool = False) -> list[Any]:
        """Pop messages as ``(peer, message)``; greetings and reasons only on request."""
        decisions, self.decisions = self.decisions, []
        if not with_reasons:
            decisions = [d for one in decisions if (d := self._without_reason(one)) is not None]
        boring = () if about_members else (Welcome, PeerInfo)
        return [
            (d.peer, d.message)
            for d in decisions
            if isinstance(d, SendMessageAction) and not isinstance(d.message, boring)
        ]

    def _without_reason(
        self, decision: AnnouncePeerAction | CommitPipelineAction | SendMessageAction
    ) -> AnnouncePeerAction | CommitPipelineAction | SendMessageAction | None:
        """Drop routes that only give a reason or progress."""
        match decision:
            case SendMessageAction(peer, Welcome()):
                self._routes.pop(peer, None)
            case SendMessageAction(peer, Route() as route):
                route = msgspec.structs.replace(route, reason="", forming_progress=0)
                if self._routes.get(peer) == route:
                    return None
                self._routes[peer] = route
                return SendMessageAction(peer, route)
        return decision

    def wait(self, seconds: float, *alive: str) -> None:
        """Let time pass in steps while the ``alive`` peers report their stages."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for name in alive:
                self.handle_event(
                    PeerReportedEvent(name, self.fleet.registry.sessions[name].report)
                )
            self.handle_event(TimePassedEvent())

    def report(self, name: str, *workers: WorkerState, fresh: bool = False, **changes: Any) -> None:
        self.handle_event(PeerReportedEvent(name, report(name, *workers, **changes), fresh))

    def join(self, name: str, **changes: str) -> None:
        self.handle_event(MemberAddedEvent(member(name)))
        self.report(name, **changes)

    def serve(self, **changes: ModelFacts | int | str) -> None:
        """Serve a model; by default every peer gets a stage, ``changes`` override that."""
        values = {"facts": FACTS, "source": "a", "min_peers": self.min_peers, "min_stages": 16}
        values |= changes
        self.handle_event(DesiredStateChangedEvent((DesiredModel(**values),)))

    def serve_all(self, *models: DesiredModel) -> None:
        """Serve these models."""
        self.handle_event(DesiredStateChangedEvent(models))

    def deployment(self, model: str, replica: int = 0) -> Reconciler:
        """The deployment of a model."""
        return next(one for one in self.fleet.deployments if one.key == (model, replica))

    def loaded(
        self,
        message: Assign,
        peer: str,
        port: int = 5468,
        blocks: int | None = None,
        profile: Profile = QUICK,
    ) -> None:
        self.handle_event(
            StageReportedEvent(
                peer,
                StageLoaded(
                    pipeline=message.pipeline,
                    epoch=message.epoch,
                    stage=message.stage,
                    port=port,
                    max_blocks=BLOCKS.get(peer, 70) if blocks is None else blocks,
                    profile=profile,
                ),
            )
        )

    def ready(self, peer: str, stage: int, epoch: int, pipeline: str = "p1") -> None:
        self.handle_event(
            StageReportedEvent(peer, StageReady(pipeline=pipeline, epoch=epoch, stage=stage))
        )

    def failed(
        self, peer: str, stage: int, epoch: int, pipeline: str = "p1", **changes: bool
    ) -> None:
        self.handle_event(
            StageReportedEvent(
                peer,
                StageFailed(pipeline=pipeline, epoch=epoch, stage=stage, reason="oops", **changes),
            )
        )

    def obey(self, batch: list[tuple[str, Assign | Route]] | None = None) -> list[Any]:
        """Let the peers carry out all messages and report, until none are left."""
        everything = []
        while batch := batch or self.pop_messages():
            everything += batch
            for peer, message in batch:
                if isinstance(message, Prefetch):
                    self.prefetched(peer, message.number)
                elif isinstance(message, Assign):
                    self.loaded(message, peer)
                elif isinstance(message, FormPipeline):
                    stage = next(i for i, a in enumerate(message.ring) if a.peer == peer)
                    self.ready(peer, stage, message.epoch, message.pipeline)
            batch = None
        self.show_workers()
        return everything

    def prefetched(
        self, peer: str, number: int, state: str = "done", reason: str = "", done: int = 0
    ) -> None:
        said = PrefetchState(number=number, state=state, reason=reason, done=done)
        old = self.fleet.registry.sessions[peer].report
        self.handle_event(PeerReportedEvent(peer, msgspec.structs.replace(old, prefetch=said)))

    def show_workers(self) -> None:
        """Have each peer report its stage of the formation."""
        for one in self.fleet.deployments:
            if one.formation is not None:
                self._show_formation(one.formation)

    def _show_formation(self, formation: Formation) -> None:
        for stage, record in enumerate(formation.record.stages):
            state = "ready" if formation.state == "ready" else "loading"
            shown = worker(state, formation.record.epoch, stage, record.layers, formation.record.id)
            old = self.fleet.registry.sessions[record.peer].report
            self.handle_event(
                PeerReportedEvent(
                    record.peer,
                    report(
                        record.peer,
                        shown,
                        stage=old.stage,
                        memory=old.device.memory,
                        pid=old.daemon_pid,
                    ),
                )
            )


class Kit:
    """What tests build their swarms from."""

    FakeFleet = FakeFleet
    member = staticmethod(member)
    report = staticmethod(report)
    worker = staticmethod(worker)
    facts = FACTS
    GB = GB


@pytest.fixture(scope="session")
def kit() -> Kit:
    """What tests build their swarms from."""
    return Kit()


@pytest.fixture
def running() -> FakeFleet:
    """Three peers that serve the toy in epoch 1, with no messages left."""
    fake = FakeFleet("a", "b", "c", min_peers=3)
    fake.serve()
    for name in "abc":
        fake.report(name)
    fake.wait(1.5, *"abc")
    fake.obey()
    assert fake.reconciler.is_ready
    fake.pop_messages()
    return fake
