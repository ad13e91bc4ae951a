"""A whole swarm in virtual time from one seed: PCs, faults and clients."""

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from unittest.mock import patch

from molink.errors import MolinkError
from molink.facts.model import ModelFacts
from molink.link import heartbeat
from molink.ring import ring_measurements as linkround
from molink.sim.event_queue import EventQueue
from molink.swarm.controller.records import DesiredModel
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.swarm.frontend.stream import StreamLimits
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.instructions import PeerInfo, StageAddress
from molink.wire.messages.serving import OutputToken, Request
from tests.dst.coordinator import Coordinator, Disk
from tests.dst.daemon import Daemon, Peer
from tests.dst.faults import Faults
from tests.dst.leadership import CONTROL, Membership
from tests.dst.liar import Liars
from tests.dst.membership import found_swarm, peer_of
from tests.dst.model import VOCABULARY, reference
from tests.dst.monitor import Monitor
from tests.dst.network import Network
from tests.dst.process import Failure, Pc
from tests.dst.worker import Mode, Worker

#: Requests of a seed.
REQUESTS = 8
#: Seconds between two checks.
_CHECK_INTERVAL = 1.0
#: Periods longer than the product's, in seconds, to save time: heartbeats while requests live, and
#: link measurements. Timeouts are the same.
_BEAT, _REPORT = 1.0, 100.0
#: After all faults, seconds in which requests must end and the swarm must settle.
_END_WITHIN = 90.0
_SETTLE_WITHIN = 60.0
#: After this time without a fault there is at most one epoch.
_CALM = 20.0


@dataclass
class Client:
    """Sends one request and knows the answer."""

    number: int
    model: str
    prompt: tuple[int, ...]
    count: int
    sampling: SamplingParams
    stop: tuple[int, ...]
    window: int
    slow: bool
    at: float
    expected: list[int]
    daemon: Daemon | None = None
    got: list[int] = field(default_factory=list)
    #: How it ended; empty while it runs.
    end: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a seed."""

    seed: int
    ends: tuple[str, ...]
    counts: dict[str, int]
    faults: tuple[str, ...]
    #: Virtual seconds.
    seconds: float
    #: Hash of the story.
    trace: int


class World:
    """State of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        several: bool = False,
        late: bool = False,
        faults: bool = True,
        verbose: bool = False,
    ) -> None:
        """``several``: two models with different numbers of layers are served.

        In every other seed the first one has two pipelines, if there are enough PCs. ``late``:
        coordinators read late at times. ``faults``: other faults occur.
        """
        self.seed = seed
        self.rng = rng = Random(seed)
        self.event_queue = EventQueue()
        self.network = Network(self.event_queue, seed, rng)
        self.monitor = Monitor(self)
        self.story: deque[str] = deque(maxlen=100_000 if verbose else 40)
        self._trace = 0
        self.layers = rng.choice((3, 3, 3, 4))
        self.load_s = rng.choice(((0.1, 0.4), (0.2, 1.5)))
        # Every other seed uses drafts, without changing the other random choices. Every fourth has
        # short passes with lookahead, and longer answers.
        drafts = (0, 3, 0, 1)[seed % 4]
        self.mode = replace(_mode(rng), num_speculative_tokens=drafts, lookahead=6 * (drafts == 1))
        self.context = 64
        self.pcs = [Pc(self.event_queue, f"pc{i}", i) for i in range(self.layers + 1)]
        self.network.pcs = {pc.name: pc for pc in self.pcs}
        self.min_peers = rng.choice((1, self.layers))
        self.models = {"toy": self.layers}
        self.replicas = {"toy": 1, "other": 1}
        if several:
            self.models["other"] = self.layers + 1
            self.replicas["toy"] += seed % 2
            self.min_peers = 1
        self.liars = Liars(self)
        self.peers = self._swarm()
        self.daemons: dict[Pc, Daemon] = {}
        #: PCs that will not come back.
        self.lost: set[Pc] = set()
        #: Peers that left or were revoked.
        self.removed: set[str] = set()
        for pc in self.pcs:
            self.start_daemon(pc)
        self.clients = [self._client(number) for number in range(REQUESTS)]
        for client in self.clients:
            self.event_queue.schedule_at(client.at, self._ask, client)
        self.faults = Faults(self, rng, late=late, others=faults)

    # --- processes -----------------------------------------------------------------------------

    def pc_of(self, peer: str) -> Pc:
        """The PC of a peer."""
        return next(one.pc for one in self.peers if one.id == peer)

    def coordinators(self) -> Iterator[Coordinator]:
        """All running coordinators."""
        for pc in self.pcs:
            yield from (one for one in pc.processes if isinstance(one, Coordinator))

    def where(self, address: StageAddress) -> tuple[str, int]:
        """Name of the PC, and port."""
        return address.addresses[0], address.port

    def workers(self) -> Iterator[Worker]:
        """All running workers."""
        for pc in self.pcs:
            yield from (one for one in pc.processes if isinstance(one, Worker))

    def start_daemon(self, pc: Pc) -> None:
        """Start a PC's daemon."""
        if not pc.up or pc in self.daemons or pc in self.lost:
            return
        daemon = self.daemons[pc] = Daemon(self, self.peers[pc.number])
        daemon.on_death.append(lambda: self._daemon_died(daemon))

    def _daemon_died(self, daemon: Daemon) -> None:
        del self.daemons[daemon.pc]
        self.network.died(daemon)
        for client in self.clients:
            if client.daemon is daemon and not client.end:
                self._ended(client, "its endpoint died")

    def kill_pc(self, pc: Pc) -> None:
        """Cut a PC's power."""
        pc.up = False
        for process in list(pc.processes):
            process.die()
        self.network.pc_down()

    def boot(self, pc: Pc) -> None:
        """Restore a PC's power."""
        pc.up = True
        self.event_queue.schedule_at(
            self.event_queue.now + self.rng.uniform(0.2, 1.0), self.start_daemon, pc
        )

    # --- setup -----------------------------------------------------------------------------------

    def _swarm(self) -> list[Peer]:
        """Make all PCs members that know the first one's coordinator and its state."""
        keys = {pc: peer_of(pc.name).keys.public for pc in self.pcs}
        ids = {pc: peer_of(pc.name).peer for pc in self.pcs}
        announced = {
            ids[pc]: PeerInfo(
                peer=ids[pc],
                name=pc.name,
                public_key=keys[pc],
                addresses=(pc.name,),
                control_port=CONTROL,
                models=tuple(self.models),
            )
            for pc in self.pcs
        }
        first = ids[self.pcs[0]]
        models = tuple(self._desired(first, model) for model in self.models)
        disk = Disk(found_swarm(self.pcs, self.liars.known), announced, models)
        follows = Membership(0, first, f"coordinator of {first}", self.pcs[0].name)
        return [
            Peer(pc, keys[pc], ids[pc], follows, disk.replica(), None if pc.number else disk)
            for pc in self.pcs
        ]

    def _desired(self, source: str, model: str) -> DesiredModel:
        facts = ModelFacts(
            name=model,
            layers=self.models[model],
            layer_bytes=1 << 20,
            first_bytes=0,
            last_bytes=0,
            kv_bytes=0,
            max_model_len=self.context,
            element_bytes=4,
        )
        return DesiredModel(
            facts,
            source,
            min_peers=self.min_peers,
            min_stages=2 if self.seed % 8 == 5 else 16,
            replicas=self.replicas[model],
        )

    def _client(self, number: int) -> Client:
        rng = self.rng
        model = [*self.models][number % len(self.models)]
        layers = self.models[model]
        shared = [hash((self.seed, rng.randrange(2), i)) % VOCABULARY for i in range(12)]
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 5))]
        prompt = tuple(shared[: rng.choice((0, 4, 6, 9))] + own)
        count = rng.randrange(3, 9) + self.mode.lookahead
        penalty = 1.1 if rng.random() < 0.25 else 1.0
        sampling = SamplingParams(seed=rng.randrange(1 << 30), repetition_penalty=penalty)
        expected = reference(layers, prompt, count, (), sampling)
        stop: tuple[int, ...] = ()
        if rng.random() < 0.15:
            stop = (expected[-2],)
            expected = reference(layers, prompt, count, stop, sampling)
        window = rng.choice((2, 256, 256))
        at = rng.uniform(1.0, 7.0)
        return Client(
            number, model, prompt, count, sampling, stop, window, rng.random() < 0.2, at, expected
        )

    # --- clients ---------------------------------------------------------------------------------

    def _ask(self, client: Client) -> None:
        daemons = [self.daemons[pc] for pc in self.pcs if pc in self.daemons]
        if not daemons:
            self.event_queue.schedule_at(self.event_queue.now + 1.0, self._ask, client)
            return
        client.daemon = self.rng.choice(daemons)
        client.daemon.run(self._on_ask_due, client)

    def _on_ask_due(self, client: Client) -> None:
        assert client.daemon is not None
        request = Request(client.model, client.prompt, client.count, client.sampling, client.stop)
        self.note(f"client {client.number} asks {client.daemon}")
        key = ""

        def on_token(generated: GeneratedToken, token: OutputToken) -> None:
            self._token(client, key, generated, token)

        def on_error(error: MolinkError) -> None:
            self._ended(client, f"{type(error).__name__}: {error}")

        limits = StreamLimits(credit_window=client.window)
        key = client.daemon.ask(request, limits, on_token, on_error)

    def _token(
        self, client: Client, key: str, generated: GeneratedToken, token: OutputToken
    ) -> None:
        if client.end:
            raise Failure(f"client {client.number} gets more after the end")
        assert client.daemon is not None
        at = len(client.got)
        if generated.position != len(client.prompt) + at:
            raise Failure(f"client {client.number} gets position {generated.position}, not {at}")
        if at >= len(client.expected) or generated.token != client.expected[at]:
            raise Failure(
                f"client {client.number} gets {generated.token} as answer's token {at}, not "
                f"{client.expected[at : at + 1]}, in epoch {token.epoch}"
            )
        stream = client.daemon.active[key].stream
        submitted = stream._submitted
        if submitted is None or token.epoch != submitted.epoch:
            raise Failure(f"client {client.number} takes a token of epoch {token.epoch}")
        client.got.append(generated.token)
        whole = len(client.got) == len(client.expected)
        if (generated.finish_reason is not None) != whole:
            raise Failure(f"client {client.number} ends after {len(client.got)} tokens")
        if whole:
            client.daemon.call_soon(lambda: self._finished(client, key))
        elif client.slow:
            client.daemon.later(0.3, client.daemon.on_consumed, key, 1)
        else:
            client.daemon.on_consumed(key, 1)

    def _finished(self, client: Client, key: str) -> None:
        self._ended(client, "whole")
        assert client.daemon is not None
        client.daemon.close(key)

    def _ended(self, client: Client, how: str) -> None:
        client.end = client.end or how
        if client.end in ("whole", "its endpoint died"):
            return
        self.monitor.counts["lost"] += 1
        if not self.faults.long:
            raise Failure(f"client {client.number} ends: {how}")
        self.note(f"client {client.number}: {how}")

    # --- time ------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until all requests have ended and the swarm is settled.

        Raises:
            Failure: an invariant was violated.
        """
        with (
            patch.object(heartbeat, "BUSY_INTERVAL", _BEAT),
            patch.object(linkround, "REPORT_INTERVAL", _REPORT),
            patch.object(linkround, "MIN_INTERVAL", _REPORT),
        ):
            return self._run()

    def _run(self) -> Outcome:
        time = 0.0
        while not (self._is_finished and time >= self.faults.until):
            time += _CHECK_INTERVAL
            self.event_queue.run(time)
            self._check(time)
            if time > self.faults.until + _END_WITHIN:
                late = [client.number for client in self.clients if not client.end]
                raise Failure(f"requests {late} never end")
        deadline = time + _SETTLE_WITHIN
        while why := self._unsettled():
            time += _CHECK_INTERVAL
            self.event_queue.run(time)
            self._check(time)
            if time > deadline:
                raise Failure(f"not well again {_SETTLE_WITHIN:g} s after the last fault: {why}")
        for worker in self.workers():
            if worker.epoch_state is not None:
                self.monitor.on_epoch_ended(worker, worker.epoch_state)
        self.monitor.check_terms()
        return Outcome(
            self.seed,
            tuple(client.end for client in self.clients),
            dict(self.monitor.counts),
            tuple(self.faults.log),
            time,
            self._trace,
        )

    @property
    def _is_finished(self) -> bool:
        return all(client.end for client in self.clients)

    def _check(self, time: float) -> None:
        for worker in self.workers():
            if worker.epoch_state is not None:
                self.monitor.check_epoch(worker, worker.epoch_state)
        if time > self.faults.until + _CALM and not self._is_split_by_liar:
            pipelines = [pipeline for pipeline, _ in self.monitor.standing()]
            if len(set(pipelines)) < len(pipelines):
                raise Failure(f"{self.monitor.standing()} stand at once")

    @property
    def _is_split_by_liar(self) -> bool:
        """Whether a liar leads a part of the swarm.

        Once its lies have used up its terms, the other leader can't pass it for some minutes.
        """
        leading = [one.pc for one in self.coordinators()]
        return len(leading) > 1 and any(pc in self.liars.known for pc in leading)

    def _unsettled(self) -> str:
        """Why the swarm is not settled yet; empty if it is."""
        coordinators = list(self.coordinators())
        if self._is_split_by_liar:
            return ""
        if len(coordinators) != 1:
            return f"{coordinators} lead"
        coordinator = coordinators[0]
        standing: dict[str, int] = {}
        for one in coordinator.fleet.deployments:
            formation = one.formation
            if formation is None and one.replica:
                continue  # too few PCs are left
            if formation is None or not one.is_ready:
                return f"no pipeline of {one.key} is ready"
            if one.migration is not None or one.successor is not None or one.predecessor:
                return "a pipeline is about to move"
            standing[formation.record.id] = formation.record.epoch
        if sorted(self.monitor.standing()) != sorted(standing.items()):
            return f"{self.monitor.standing()} stand"
        for worker in self.workers():
            epoch = standing.get(worker.start.pipeline)
            if worker.epoch_state is None or worker.epoch_state.epoch != epoch:
                return f"{worker} is none of epoch {epoch}"
            if why := self.monitor.unsettled(worker, worker.epoch_state):
                return why
        return self._unknown(coordinator, standing)

    def _unknown(self, coordinator: Coordinator, standing: dict[str, int]) -> str:
        """Which daemon does not know the members, the leader or the routes."""
        members = frozenset(coordinator.fleet.registry.members)
        if returned := members & self.removed:
            return f"{sorted(returned)} are members again"
        for daemon in self.daemons.values():
            if daemon.peer.id not in members:
                continue  # it has left, and is about to end
            if daemon.peer.membership.term != coordinator.term:
                return f"{daemon} follows another term"
            if daemon.book.peers != members:
                return f"{daemon} knows other members"
            targets = [one for model in self.models for one in daemon.schedulers.targets(model)]
            if {one.pipeline: one.epoch for one in targets} != standing:
                return f"{daemon} has no way to all of {standing}"
        return ""

    def note(self, text: str) -> None:
        """Append to the story."""
        line = f"{self.event_queue.now:9.4f} {text}"
        self._trace = hash((self._trace, *line.encode()))
        self.story.append(line)


def _mode(rng: Random) -> Mode:
    return Mode(
        policy=rng.choice(("fifo", "fifo", "concurrent", "adaptive")),
        cut_through=rng.random() < 0.5,
        sub_chunk=rng.choice((0, 2, 3)),
        chunk=rng.choice((4, 8)),
        micro_batches=rng.choice((0, 1, 2)),
        blocks=rng.choice((8, 14, 30)),
        prefill_only=rng.random() < 0.5,
    )


def run(seed: int, *, several: bool = False, late: bool = False, faults: bool = True) -> Outcome:
    """Run a seed.

    Raises:
        Failure: an invariant was violated; tells how to replay it.
    """
    world = World(seed, several=several, late=late, faults=faults)
    gc.disable()  # a sixth of the time
    try:
        return world.run()
    except Exception as error:
        story = "\n".join(world.story)
        raise Failure(
            f"seed {seed}: {type(error).__name__}: {error}\n{story}\n"
            f"again: python -m tests.dst {seed}{' several' * several}{' late' * late}"
            f"{' alone' * (not faults)}"
        ) from error
    finally:
        gc.enable()


def run_all(
    seeds: Iterable[int], *, several: bool = False, late: bool = False, faults: bool = True
) -> list[Outcome]:
    """Run seeds until one fails.

    Raises:
        Failure: see :func:`run`.
    """
    outcomes = []
    for seed in seeds:
        outcomes.append(run(seed, several=several, late=late, faults=faults))
        if seed % 20 == 0:
            gc.collect()
    return outcomes
