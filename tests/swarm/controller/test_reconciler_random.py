"""Random histories: the reconciler's invariants hold in any order of events."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from molink.swarm.controller.events import (
    CommitPipelineAction,
    ConnectionTriedEvent,
    MemberRemovedEvent,
    PeerDisconnectedEvent,
    PeerReportedEvent,
    ReserveEpochAction,
    SendMessageAction,
    TimePassedEvent,
)
from molink.swarm.controller.records import PipelineRecord
from molink.wire.messages.instructions import Assign, FormPipeline, Prefetch, Route
from molink.wire.messages.peer_reports import PrefetchState
from tests.support.fake_fleet import Kit

NAMES = "abcde"

names = st.sampled_from(NAMES)
steps = st.one_of(
    st.tuples(st.just("join"), names, st.sampled_from(["auto", "auto", "none", "1-2", "5-9"])),
    st.tuples(st.just("obey"), names, st.booleans()),
    st.tuples(st.just("wait"), st.sets(names), st.sampled_from([0.25, 1.25, 3.0, 6.0, 70.0])),
    st.tuples(st.just("work"), st.sets(names, min_size=3), st.integers(1, 12)),
    st.tuples(st.just("work"), st.just(set(NAMES)), st.just(12)),
    st.tuples(st.just("fail"), names, st.booleans()),
    st.tuples(st.just("replay"), names, st.integers(0, 30)),
    st.tuples(st.just("reconnect"), names, st.integers(1, 2)),
    st.tuples(st.just("leave"), names, st.none()),
    st.tuples(st.just("cut"), names, names),
    st.tuples(st.just("serve"), st.sampled_from(["auto", "f32"]), st.integers(1, 3)),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


class World:
    """Peers that carry out some instructions, some late, some repeatedly."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.fake = kit.FakeFleet()
        self.inbox = {name: [] for name in NAMES}
        self.history = []
        self.workers = {name: {} for name in NAMES}
        self.stages = dict.fromkeys(NAMES, "auto")
        self.prefetched = dict.fromkeys(NAMES)
        self.pids = dict.fromkeys(NAMES, 1)
        self.desired = self.record = self.kept = None
        self.epoch = 0
        self.last = (0, 0)

    def step(self, kind: str, who: set[str] | str | None, what: bool | float | str | None) -> None:
        getattr(self, kind)(who, what)
        self.deliver()

    def report(self, name: str, fresh: bool = False) -> None:
        self.fake.handle_event(
            PeerReportedEvent(
                name,
                self.kit.report(
                    name,
                    *self.workers[name].values(),
                    stage=self.stages[name],
                    pid=self.pids[name],
                    prefetched=self.prefetched[name],
                ),
                fresh,
            )
        )

    def join(self, name: str, stage: str) -> None:
        self.stages[name] = stage
        self.fake.join(name, stage=stage)
        self.report(name)

    def wait(self, alive: set[str], seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.fake.now += 0.25
            for name in sorted(alive & set(self.fake.fleet.registry.sessions)):
                self.report(name)
            self.fake.handle_event(TimePassedEvent())

    def obey(self, name: str, report: bool) -> None:
        if not self.inbox[name]:
            return
        message = self.inbox[name].pop(0)
        if isinstance(message, Prefetch):
            self.prefetched[name] = PrefetchState(number=message.number, state="done")
            self.report(name)
        elif isinstance(message, Assign):
            shown = (message.epoch, message.stage, message.layers, message.pipeline)
            self.workers[name][message.pipeline] = self.kit.worker("loaded", *shown)
            self.act(("loaded", message, name))
        elif isinstance(message, FormPipeline):
            stage = next(i for i, a in enumerate(message.ring) if a.peer == name)
            old = self.workers[name].get(message.pipeline)
            if old is not None and old.epoch == message.epoch:
                shown = (message.epoch, stage, old.layers, message.pipeline)
                self.workers[name][message.pipeline] = self.kit.worker("ready", *shown)
            self.act(("ready", name, stage, message.epoch, message.pipeline))
        if report and name in self.fake.fleet.registry.sessions:
            self.report(name)

    def work(self, busy: set[str], rounds: int) -> None:
        """Let some peers carry out their instructions for a while."""
        for _ in range(rounds):
            self.deliver()
            self.wait(busy, 0.5)
            self.deliver()
            for name in sorted(busy):
                self.obey(name, True)

    def act(self, call: tuple[Any, ...]) -> None:
        self.history.append(call)
        getattr(self.fake, call[0])(*call[1:])

    def fail(self, name: str, next_lost: bool) -> None:
        if not self.fake.fleet.deployments:
            return
        formation = self.fake.reconciler.formation
        stage = formation.stage_of(name) if formation is not None else None
        if stage is not None:
            record = formation.record
            self.fake.failed(name, stage, record.epoch, record.id, next_lost=next_lost)

    def replay(self, _name: str, index: int) -> None:
        if self.history:
            self.act(self.history[index % len(self.history)])

    def reconnect(self, name: str, pid: int) -> None:
        if self.pids[name] != pid:
            self.pids[name], self.workers[name] = pid, {}
            self.prefetched[name] = None
        if name in self.fake.fleet.registry.members:
            self.report(name, fresh=True)

    def cut(self, name: str, other: str) -> None:
        """Cut the connection of two peers, or that to the coordinator if both are the same peer."""
        if name == other:
            self.fake.handle_event(PeerDisconnectedEvent(name))
        else:
            self.fake.handle_event(ConnectionTriedEvent(name, other, succeeded=False))

    def leave(self, name: str, _: None) -> None:
        self.fake.handle_event(MemberRemovedEvent(name, "left"))
        self.workers[name] = {}

    def serve(self, dtype: str, min_peers: int) -> None:
        old = self.desired
        self.fake.serve(dtype=dtype, min_peers=min_peers)
        self.desired = self.fake.reconciler.desired
        if old is None or old.dtype != dtype:
            self.kept = None  # the stored state does the same

    def restart(self, *_: None) -> None:
        """Restart the coordinator with the committed state."""
        self.deliver()
        old = self.fake
        self.fake = self.kit.FakeFleet(
            *old.fleet.registry.members,
            now=old.now,
            desired=self.desired,
            pipeline=self.kept,
            last=self.last,
        )

    def deliver(self) -> None:
        """Deliver actions to peers and check them."""
        decisions, self.fake.decisions = self.fake.decisions, []
        for decision in decisions:
            if isinstance(decision, CommitPipelineAction):
                self.committed(decision.pipeline)
            elif isinstance(decision, ReserveEpochAction):
                self.reserved(decision.pipeline, decision.epoch)
            elif isinstance(decision, SendMessageAction):
                self.sent(decision.peer, decision.message)

    def committed(self, record: PipelineRecord) -> None:
        assert record.epoch >= self.epoch
        assert record.epoch > self.epoch or record.formed
        first = [stage.layers[0] for stage in record.stages]
        last = [stage.layers[1] for stage in record.stages]
        assert first == [0, *last[:-1]]
        assert last[-1] == self.kit.facts.layers
        self.reserved(record.id, record.epoch)
        self.record = self.kept = record

    def reserved(self, pipeline: str, epoch: int) -> None:
        assert epoch >= self.epoch
        self.epoch = epoch
        self.last = (max(self.last[0], int(pipeline[1:])), epoch)

    def sent(self, peer: str, message: Any) -> None:
        if isinstance(message, Assign | FormPipeline):
            assert message.epoch == self.epoch
            beside = message.pipeline != self.record.id
            assert beside or message.epoch == self.record.epoch
            assert beside or isinstance(message, Assign) or self.record.formed
            self.inbox[peer].append(message)
        elif isinstance(message, Prefetch):
            self.inbox[peer].append(message)
        elif isinstance(message, Route) and message.is_ready:
            assert (message.pipeline, message.epoch) == (self.record.id, self.record.epoch)
            assert self.record.formed
            assert message.scheduler.peer == self.record.stages[0].peer

    def check(self) -> None:
        reconciler = self.fake.reconciler
        assert bool(reconciler.reason) or reconciler.is_ready
        assert reconciler.migration is None or reconciler.is_ready
        if reconciler.is_ready:
            record = reconciler.formation.record
            said = {
                call[1:] for call in self.history if call[0] == "ready" and call[3] == record.epoch
            }
            for stage, placed in enumerate(record.stages):
                assert (placed.peer, stage, record.epoch, record.id) in said
                assert self.fake.fleet.registry.is_live(placed.peer)


@given(st.lists(steps, min_size=5, max_size=40))
@settings(max_examples=60, deadline=None)
def test_invariants_hold_for_any_history(kit: Kit, plan: list[Any]) -> None:
    world = World(kit)
    for name in "abc":
        world.step("join", name, "auto")
    world.step("serve", "auto", 2)
    for step in plan:
        members = set(world.fake.fleet.registry.members)
        world.step(*step)
        gone = members - set(world.fake.fleet.registry.members)
        world.inbox.update({name: [] for name in gone})
        world.check()


@given(st.lists(steps, max_size=25))
@settings(max_examples=60, deadline=None)
def test_pipeline_always_recovers(kit: Kit, plan: list[Any]) -> None:
    """After any history, the model is served once peers behave."""
    world = World(kit)
    for step in plan:
        world.step(*step)
    world.serve("auto", 2)
    for name in "ab":
        world.join(name, "auto")
    for name in "cde":
        world.leave(name, None)
    for by, to in ("ab", "ba"):
        world.fake.handle_event(ConnectionTriedEvent(by, to, succeeded=True))
    for _ in range(400):
        if world.fake.reconciler.is_ready:
            return
        world.wait({"a", "b"}, 0.5)
        world.deliver()
        for name in "ab":
            world.obey(name, True)
            world.deliver()
    raise AssertionError(world.fake.fleet.story)
