"""Checks a simulated swarm: what must never happen, and what must hold in the end."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from molink.swarm.controller.records import PipelineRecord
from molink.swarm.election.term_budget import FREE_ROUNDS
from molink.swarm.election.terms import round_of
from molink.wire.messages.data_plane import Frame, LinkHello
from molink.wire.messages.serving import Rejected, Submit
from tests.dst.network import Sender
from tests.dst.process import Failure, Process
from tests.dst.worker import StageEpoch, Worker

if TYPE_CHECKING:
    from tests.dst.daemon import Daemon
    from tests.dst.world import World


#: For this many seconds after a rival has ended, peers may not know that it has.
_ENDED_BEFORE = 5.0
#: Two for each election of a seed, and what one lying branch may cause.
_MAX_ROUNDS = 20 + 2 * FREE_ROUNDS


class Monitor:
    """All invariants, and counts of the faults' effects."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self._epochs: dict[Worker, int] = {}
        self._leaders: dict[int, str] = {}
        #: When the last coordinator of each leader ended.
        self._ended_at: dict[str, float] = {}

    def leads(self, leader: str, term: int) -> None:
        """A coordinator leads in a term."""
        if self._leaders.setdefault(term, leader) != leader:
            raise Failure(f"{leader} leads in term {term} of {self._leaders[term]}")

    def stopped_leading(self, leader: str) -> None:
        """A coordinator ended."""
        self._ended_at[leader] = self._world.event_queue.now

    def steps_down(self, daemon: "Daemon", rival: str) -> None:
        """A leader that others hear makes room only for a rival that leads, or led just before."""
        self.counts["steps_down"] += 1
        views = [
            one.leadership.election.build_view(one.time())
            for one in self._world.daemons.values()
            if one is not daemon and one.pc not in self._world.liars.known
        ]
        if not any(one.leader == daemon.peer.id and one.lease is not None for one in views):
            return
        leads = any(one.leader == rival for one in self._world.coordinators())
        ended = self._ended_at.get(rival, -_ENDED_BEFORE)
        own = daemon.leadership.coordinator
        if daemon.pc in self._world.liars.known or own is None or own.frozen:
            return  # nobody hears a frozen coordinator
        if not leads and self._world.event_queue.now - ended >= _ENDED_BEFORE:
            raise Failure(f"{daemon} makes room for {rival}, which doesn't lead")

    def misbehaves(self, daemon: "Daemon", peer: str, reason: str) -> None:
        """A daemon reports a peer, which must be a liar."""
        self.counts["reported"] += 1
        if self._world.pc_of(peer) not in self._world.liars.known:
            raise Failure(f"{daemon} takes {peer} for hostile: {reason}")

    def check_terms(self) -> None:
        """Lies burn few terms."""
        highest = max(round_of(term) for term in self._leaders)
        self.counts["rounds"] = highest
        if highest > _MAX_ROUNDS:
            raise Failure(f"there were {highest} rounds")

    def committed(self, coordinator: Process, record: PipelineRecord) -> None:
        """An epoch was committed."""
        if not record.formed:
            self.counts["epochs"] += 1
        stages = [stage.layers for stage in record.stages]
        self._world.note(f"epoch {record.epoch} {'formed' if record.formed else stages}")

    def obeys(self, daemon: "Daemon", term: int) -> None:
        """A daemon obeys a coordinator."""
        if term < daemon.peer.obeyed:
            raise Failure(f"{daemon} obeys term {term} after {daemon.peer.obeyed}")
        daemon.peer.obeyed = term

    def rejected(self, message: Rejected) -> None:
        """A daemon's request was rejected."""
        self.counts[f"rejected_{message.reason}"] += 1
        if message.reason in ("invalid", "too_long", "failed"):
            raise Failure(f"a scheduler says {message}")

    # --- epochs ----------------------------------------------------------------------------------

    def on_epoch_started(self, worker: Worker, epoch: int) -> None:
        """A worker joins a ring."""
        self._world.note(f"{worker} stage {worker.start.stage} in epoch {epoch}")
        if epoch <= self._epochs.get(worker, 0):
            raise Failure(f"{worker} went back to epoch {epoch}")
        self._epochs[worker] = epoch

    def stale(
        self,
        worker: Worker,
        state: StageEpoch,
        sender: Sender,
        message: Frame | LinkHello,
        payload: Any,
    ) -> None:
        """A message of another epoch's link has no effect."""
        incoming = state.runtime.incoming
        self.counts["stale"] += 1
        if incoming is None:
            return
        before = incoming.counters["link_received_frames_total"]
        data = None if payload is None else memoryview(payload).cast("B")
        incoming.handle_message(sender, message, data)
        taken = incoming.counters["link_received_frames_total"] > before
        bound = isinstance(message, LinkHello) and sender.identity in incoming._channels
        if taken or bound:
            raise Failure(f"{worker} in epoch {state.epoch} takes {message}")

    def submitted(self, worker: Worker, state: StageEpoch, message: Submit) -> None:
        """A request reaches a scheduler of its own epoch, or is refused."""
        if message.epoch == state.epoch:
            return
        self.counts["stale"] += 1
        assert state.receiver is not None
        if any(key == message.key for _, key in state.receiver._connections):
            raise Failure(f"{worker} in epoch {state.epoch} takes {message}")

    def standing(self) -> list[tuple[str, int]]:
        """Pipelines and epochs that have all stages running."""
        stages: dict[tuple[str, int], set[int]] = {}
        counts: dict[tuple[str, int], int] = {}
        for worker in self._world.workers():
            if worker.epoch_state is not None:
                which = worker.start.pipeline, worker.epoch_state.epoch
                stages.setdefault(which, set()).add(worker.start.stage)
                counts[which] = worker.epoch_state.stages
        return [which for which, found in stages.items() if len(found) == counts[which]]

    # --- stages ----------------------------------------------------------------------------------

    def on_epoch_ended(self, worker: Worker, state: StageEpoch) -> None:
        """No peer was suspected of misbehaviour."""
        self.check_epoch(worker, state)
        counts = state.runtime.incoming.counters if state.runtime.incoming is not None else {}
        for name in ("duplicates", "gaps", "unbound", "strangers"):
            self.counts[name] += int(counts.get(f"link_received_{name}_total", 0))
        if state.runtime.outgoing is not None:
            self.counts["resent"] += state.runtime.outgoing.stats.resent
        if state.runtime.scheduler is not None:
            self.counts["preemptions"] += int(
                state.runtime.scheduler.collect_stats()[0]["scheduler_preemptions_total"]
            )

    def check_epoch(self, worker: Worker, state: StageEpoch) -> None:
        """Check the invariants of a ring's stage."""
        ring, scheduler, incoming = (
            state.runtime.ring,
            state.runtime.scheduler,
            state.runtime.incoming,
        )
        ring.scoreboard.validate()
        if ring.scoreboard.num_refused or ring.num_strays:
            raise Failure(f"{worker} refused {ring.scoreboard.counters}, {ring.num_strays} strays")
        if scheduler is not None:
            scheduler.validate()
            if scheduler.num_strays:
                raise Failure(f"the scheduler on {worker} met {scheduler.num_strays} strays")
        if incoming is not None:
            incoming._receiver.validate()
            if incoming._receiver.counters.garbage:
                raise Failure(f"{worker} was sent {incoming._receiver.last_fault}")
        if state.runtime.outgoing is not None:
            state.runtime.outgoing._sender.validate()

    def unsettled(self, worker: Worker, state: StageEpoch) -> str:
        """What a stage still holds after all requests; empty if nothing."""
        ring, scheduler = state.runtime.ring, state.runtime.scheduler
        if ring.progress.has_requests or len(state.requests):
            return f"{worker} has {len(state.requests)} requests"
        if ring.scoreboard.num_waiting or ring.scoreboard.num_queued or len(ring._samples):
            return f"{worker} has work"
        if scheduler is not None:
            gauges = scheduler.collect_stats()[1]
            used, releasing = gauges["scheduler_blocks_used"], gauges["scheduler_blocks_releasing"]
            live = scheduler.live_requests
            if live or used or releasing:
                return f"the scheduler on {worker} has {live}, {used} blocks, {releasing} pending"
        if state.receiver is not None and len(state.receiver):
            return f"the receiver on {worker} has {len(state.receiver)} requests"
        return ""
