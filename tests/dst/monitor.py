"""Watches a simulated swarm: what must never happen, and what must be true in the end."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from molink.swarm.controller.records import PipelineRecord
from molink.wire.messages.data_plane import Frame, LinkHello
from molink.wire.messages.serving import Rejected, Submit
from tests.dst.network import Sender
from tests.dst.process import Failure, Process
from tests.dst.worker import StageEpoch, Worker

if TYPE_CHECKING:
    from tests.dst.daemon import Daemon
    from tests.dst.world import World


class Monitor:
    """All that has to hold, and counts of what the faults have led to."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self._epochs: dict[Worker, int] = {}
        self._leaders: dict[int, str] = {}

    def leads(self, leader: str, term: int) -> None:
        """A coordinator leads in a term."""
        if self._leaders.setdefault(term, leader) != leader:
            raise Failure(f"{leader} leads in term {term} of {self._leaders[term]}")

    def committed(self, coordinator: Process, record: PipelineRecord) -> None:
        """An epoch was committed."""
        if not record.formed:
            self.counts["epochs"] += 1
        stages = [stage.layers for stage in record.stages]
        self._world.note(f"epoch {record.epoch} {'formed' if record.formed else stages}")

    def obeys(self, daemon: "Daemon", term: int) -> None:
        """A daemon does what a coordinator says."""
        if term < daemon.peer.obeyed:
            raise Failure(f"{daemon} obeys term {term} after {daemon.peer.obeyed}")
        daemon.peer.obeyed = term

    def rejected(self, message: Rejected) -> None:
        """A daemon is told that its request can't go on."""
        self.counts[f"rejected_{message.reason}"] += 1
        if message.reason in ("invalid", "too_long", "failed"):
            raise Failure(f"a head says {message}")

    # --- epochs ----------------------------------------------------------------------------------

    def on_epoch_started(self, worker: Worker, epoch: int) -> None:
        """A worker takes its place in a ring."""
        self._world.note(f"{worker} stage {worker.start.stage} in epoch {epoch}")
        if epoch <= self._epochs.get(worker, 0):
            raise Failure(f"{worker} went back to epoch {epoch}")
        self._epochs[worker] = epoch

    def stale(
        self,
        worker: Worker,
        place: StageEpoch,
        sender: Sender,
        message: Frame | LinkHello,
        payload: Any,
    ) -> None:
        """A link of another epoch speaks: nothing may come of it."""
        incoming = place.seat.incoming
        self.counts["stale"] += 1
        if incoming is None:
            return
        before = incoming.counters["link_received_frames_total"]
        data = None if payload is None else memoryview(payload).cast("B")
        incoming.handle_message(sender, message, data)
        taken = incoming.counters["link_received_frames_total"] > before
        bound = isinstance(message, LinkHello) and sender.identity in incoming._channels
        if taken or bound:
            raise Failure(f"{worker} in epoch {place.epoch} takes {message}")

    def submitted(self, worker: Worker, place: StageEpoch, message: Submit) -> None:
        """A request has come to a head: in its own epoch, or it is refused."""
        if message.epoch == place.epoch:
            return
        self.counts["stale"] += 1
        assert place.desk is not None
        if any(key == message.key for _, key in place.desk._connections):
            raise Failure(f"{worker} in epoch {place.epoch} takes {message}")

    def standing(self) -> list[tuple[str, int]]:
        """Pipelines and epochs that have a live place for every stage."""
        stages: dict[tuple[str, int], set[int]] = {}
        counts: dict[tuple[str, int], int] = {}
        for worker in self._world.workers():
            if worker.epoch_state is not None:
                which = worker.start.pipeline, worker.epoch_state.epoch
                stages.setdefault(which, set()).add(worker.start.stage)
                counts[which] = worker.epoch_state.stages
        return [which for which, found in stages.items() if len(found) == counts[which]]

    # --- places ----------------------------------------------------------------------------------

    def on_epoch_ended(self, worker: Worker, place: StageEpoch) -> None:
        """Whatever happened on the way, nobody was dishonest."""
        self.check_epoch(worker, place)
        counts = place.seat.incoming.counters if place.seat.incoming is not None else {}
        for name in ("duplicates", "gaps", "unbound", "strangers"):
            self.counts[name] += int(counts.get(f"link_received_{name}_total", 0))
        if place.seat.outgoing is not None:
            self.counts["resent"] += place.seat.outgoing.stats.resent
        if place.seat.scheduler is not None:
            self.counts["preemptions"] += int(
                place.seat.scheduler.collect_stats()[0]["scheduler_preemptions_total"]
            )

    def check_epoch(self, worker: Worker, place: StageEpoch) -> None:
        """Invariants of a ring's stage."""
        ring, head, incoming = place.seat.ring, place.seat.scheduler, place.seat.incoming
        ring.scoreboard.validate()
        if ring.scoreboard.num_refused or ring.num_strays:
            raise Failure(f"{worker} refused {ring.scoreboard.counters}, {ring.num_strays} strays")
        if head is not None:
            head.validate()
            if head.num_strays:
                raise Failure(f"the head on {worker} met {head.num_strays} strays")
        if incoming is not None:
            incoming._receiver.validate()
            if incoming._receiver.counters.garbage:
                raise Failure(f"{worker} was sent {incoming._receiver.last_fault}")
        if place.seat.outgoing is not None:
            place.seat.outgoing._sender.validate()

    def unsettled(self, worker: Worker, place: StageEpoch) -> str:
        """What a stage still has, though all requests are over; empty if nothing."""
        ring, head = place.seat.ring, place.seat.scheduler
        if ring.progress.has_requests or len(place.requests):
            return f"{worker} has {len(place.requests)} requests"
        if ring.scoreboard.num_waiting or ring.scoreboard.num_queued or len(ring._samples):
            return f"{worker} has work"
        if head is not None:
            gauges = head.collect_stats()[1]
            used, leaving = gauges["scheduler_blocks_used"], gauges["scheduler_blocks_releasing"]
            if head.live_requests or used or leaving:
                return (
                    f"the head on {worker} has {head.live_requests}, {used} blocks, {leaving} leave"
                )
        if place.desk is not None and len(place.desk):
            return f"the desk on {worker} has {len(place.desk)} requests"
        return ""
