"""Faults of a seed: three or more, some at once."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.dst.coordinator import Coordinator
from tests.dst.membership import leave, peer_of, revoke
from tests.dst.process import Pc, Process
from tests.dst.worker import Worker

if TYPE_CHECKING:
    from tests.dst.world import World

#: Seconds of the swarm's life in which faults begin.
BEGIN = (0.3, 10.0)
#: A partition, sleep or power cut longer than this, in seconds, may cost a request, which waits 30
#: s for a pipeline. A frozen process must not cost one, however long, once it was served.
LONG = 12.0


class Faults:
    """Draws and schedules all faults when created; ``until`` is when the last one ends."""

    def __init__(self, world: "World", rng: Random, *, late: bool, others: bool) -> None:
        """``late``: coordinators read late at times; ``others``: all other faults occur."""
        self._world = world
        self._rng = rng
        self.until = 0.0
        #: Whether a fault lasts so long that a request may end for lack of a pipeline.
        self.long = False
        #: Applied faults as text.
        self.log: list[str] = []
        kinds: list[tuple[int, Callable[[], None]]] = [
            (3, self._kill_worker),
            (2, self._kill_daemon),
            (2, self._kill_coordinator),
            (2, self._kill_pc),
            (3, self._freeze_worker),
            (2, self._freeze_daemon),
            (2, self._freeze_coordinator),
            (2, self._suspend_pc),
            (3, self._cut),
            (3, self._cut_one_way),
            (2, self._part),
            (3, self._reset),
            (2, self._echo),
            (2, self._slow_link),
            (1, self._leave),
        ]
        weights, actions = zip(*kinds, strict=True)
        drawn = rng.choices(actions, weights, k=rng.choice((3, 3, 3, 4, 5))) if others else []
        for action in [*drawn, *([self._read_late] * 2 if late else ())]:
            at = rng.uniform(*BEGIN)
            self.until = max(self.until, at)
            world.event_queue.schedule_at(at, action)
        if others and world.liars.known:
            chance = Random(world.seed)  # the other random choices stay the same
            at = chance.uniform(*BEGIN)
            self.until = max(self.until, at)
            world.event_queue.schedule_at(at, self._lie, chance.choice((3.0, 8.0, 12.0, 25.0)))

    # --- helpers ---------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        line = f"{self._world.event_queue.now:.2f} {text}"
        self.log.append(line)
        self._world.note(f"FAULT {text}")

    def _for(self, seconds: float, undo: Callable[[], None], *, may_cost: bool = True) -> None:
        at = self._world.event_queue.now + seconds
        self.until = max(self.until, at)
        self.long |= may_cost and seconds > LONG
        self._world.event_queue.schedule_at(at, undo)

    def _pcs(self) -> list[Pc]:
        return [pc for pc in self._world.pcs if pc.up]

    def _pair(self) -> tuple[Pc, Pc]:
        one, other = self._rng.sample(self._world.pcs, 2)
        return one, other

    def _a_while(self) -> float:
        """Duration of a freeze: 1 to 30 s, rarely long."""
        longest = self._rng.choice((2.0, 4.0, 6.0, 6.0, 8.0, 8.0, 12.0, 30.0))
        return self._rng.uniform(max(1.0, longest / 2), longest)

    # --- processes -------------------------------------------------------------------------------

    def _worker(self) -> Worker | None:
        workers = list(self._world.workers())
        return self._rng.choice(workers) if workers else None

    def _kill_worker(self) -> None:
        worker = self._worker()
        if worker is not None:
            self._say(f"kill {worker}")
            worker.die()

    def _kill_daemon(self) -> None:
        daemons = list(self._world.daemons.values())
        if daemons:
            daemon = self._rng.choice(daemons)
            self._say(f"kill {daemon}")
            daemon.die()
            self._for(self._rng.uniform(0.5, 6.0), lambda: self._world.start_daemon(daemon.pc))

    def _kill_coordinator(self) -> None:
        coordinator = self._coordinator()
        if coordinator is not None:
            self._say(f"kill {coordinator}")
            coordinator.die()

    def _coordinator(self) -> Coordinator | None:
        found = list(self._world.coordinators())
        return self._rng.choice(found) if found else None

    def _freeze(self, process: Process | None) -> None:
        if process is None or process.frozen:
            return
        seconds = self._a_while()
        self._say(f"freeze {process} for {seconds:.1f} s")
        process.freeze()
        self._world.network.froze(process)
        # A swarm that has never served waits for its configured number of PCs: after a permanent
        # loss, for all that are left.
        waits = bool(self._world.lost) and not self._world.monitor.counts["epochs"]
        self._for(seconds, process.thaw, may_cost=waits)

    def _freeze_worker(self) -> None:
        self._freeze(self._worker())

    def _freeze_daemon(self) -> None:
        daemons = list(self._world.daemons.values())
        self._freeze(self._rng.choice(daemons) if daemons else None)

    def _freeze_coordinator(self) -> None:
        self._freeze(self._coordinator())

    def _read_late(self) -> None:
        """The leader's CPU is so busy that it reads late but its timers fire."""
        coordinator = self._coordinator()
        if coordinator is not None:
            late, seconds = self._rng.uniform(0.5, 6.0), self._a_while()
            self._say(f"{coordinator} reads {late:.1f} s late for {seconds:.1f} s")
            coordinator.read_late(late, seconds)
            self._for(late + seconds, lambda: None, may_cost=False)

    def _lie(self, seconds: float) -> None:
        """One or two PCs of one branch lie about the leader."""
        liars = self._world.liars
        self._say(f"{liars.known} lie for {seconds:g} s")
        liars.start()
        self._for(seconds, liars.stop)

    # --- PCs -------------------------------------------------------------------------------------

    def _kill_pc(self) -> None:
        world = self._world
        pcs = self._pcs()
        if not pcs:
            return
        pc = self._rng.choice(pcs)
        for_good = not world.lost and self._rng.random() < 0.4
        self._say(f"{pc} loses its power{' for good' if for_good else ''}")
        world.kill_pc(pc)
        if for_good:
            world.lost.add(pc)
        else:
            self._for(self._rng.uniform(2.0, 15.0), lambda: world.boot(pc))

    def _suspend_pc(self) -> None:
        pcs = self._pcs()
        if not pcs:
            return
        pc, seconds = self._rng.choice(pcs), self._a_while()
        self._say(f"{pc} sleeps for {seconds:.1f} s")
        pairs = self._around([pc])
        asleep = [process for process in pc.processes if not process.frozen]
        for process in asleep:
            process.freeze()
        self._world.network.cut(pairs)

        def wake() -> None:
            self._world.network.heal(pairs)
            for process in asleep:
                process.thaw()

        self._for(seconds, wake)

    def _leave(self) -> None:
        """A member leaves or is revoked."""
        world = self._world
        coordinator = self._coordinator()
        if coordinator is None or coordinator.frozen:
            return
        log = coordinator.disk.log
        members = [
            peer
            for peer in world.peers
            if log.is_member(peer.id)
            and peer.id not in log.owners
            and peer.pc in world.daemons
            and peer.pc is not coordinator.pc
        ]
        if len(members) < 2:
            return
        peer = self._rng.choice(members)
        why = self._rng.choice(("left", "was revoked"))
        leaver = peer_of(peer.pc.name)
        after = leave(log, leaver) if why == "left" else revoke(log, leaver, world.event_queue.now)
        gone = [one for one in world.peers if log.is_member(one.id) and not after.is_member(one.id)]
        # The swarm may wait for this many live PCs.
        left = len(world.pcs) - len({*world.lost, *(one.pc for one in gone)})
        if left < world.min_peers:
            return
        self._say(f"{peer.pc} {why}")
        coordinator.change_log(after)
        for one in gone:
            world.lost.add(one.pc)
            world.removed.add(one.id)
            daemon = world.daemons.get(one.pc)
            if daemon is not None:
                daemon.later(0.5, daemon.die)

    # --- the network -----------------------------------------------------------------------------

    def _around(self, part: list[Pc]) -> list[tuple[Pc, Pc]]:
        """Both directions between these PCs and the others."""
        rest = [pc for pc in self._world.pcs if pc not in part]
        return [pair for one in part for other in rest for pair in ((one, other), (other, one))]

    def _cut_for(self, pairs: list[tuple[Pc, Pc]], what: str) -> None:
        seconds = self._rng.choice((0.5, 1.5, 3.0, 5.0, 8.0, 15.0)) * self._rng.uniform(0.6, 1.0)
        self._say(f"{what} for {seconds:.1f} s")
        self._world.network.cut(pairs)
        self._for(seconds, lambda: self._world.network.heal(pairs))

    def _cut(self) -> None:
        pcs = self._world.pcs
        part = self._rng.sample(pcs, self._rng.randrange(1, len(pcs) // 2 + 1))
        self._cut_for(self._around(part), f"{part} cut off")

    def _part(self) -> None:
        """Partition the leader's PC and some others for long enough that both parts lead."""
        coordinator = self._coordinator()
        if coordinator is None:
            return
        part = [coordinator.pc]
        if self._rng.random() < 0.3:
            part += self._rng.sample([pc for pc in self._world.pcs if pc is not part[0]], 1)
        seconds = self._rng.uniform(5.0, 9.0)
        self._say(f"{part} part with the rest for {seconds:.1f} s")
        pairs = self._around(part)
        self._world.network.cut(pairs)
        self._for(seconds, lambda: self._world.network.heal(pairs))

    def _cut_one_way(self) -> None:
        one, other = self._pair()
        if self._rng.random() < 0.5:
            self._cut_for([(one, other)], f"nothing gets from {one} to {other}")
        else:
            self._cut_for([(one, other), (other, one)], f"{one} and {other} apart")

    def _neighbours(self) -> tuple[str, list[tuple[Pc, Pc]]]:
        """Two PCs, or one and all others."""
        one, other = self._pair()
        if self._rng.random() < 0.5:
            return f"between {one} and {other}", [(one, other)]
        return f"of {one}", [(one, pc) for pc in self._world.pcs]

    def _reset(self) -> None:
        where, pairs = self._neighbours()
        self._say(f"connections {where} break")
        for turn in range(self._rng.choice((1, 2, 4))):
            for pair in pairs:
                self._for(0.7 * turn, partial(self._world.network.reset, *pair))

    def _echo(self) -> None:
        where, pairs = self._neighbours()
        self._say(f"connections {where} repeat themselves")
        for turn in range(8):
            for pair in pairs:
                self._for(0.4 * turn, partial(self._world.network.echo, *pair))

    def _slow_link(self) -> None:
        one, other = self._pair()
        factor = self._rng.choice((5.0, 20.0))
        self._say(f"{one} and {other} are {factor:g} times as slow")
        self._world.network.slow(one, other, factor)
        self._for(self._rng.uniform(1.0, 8.0), lambda: self._world.network.slow(one, other, 1.0))
