"""A ring without processes and sockets: the real deciders of all stages, each wired as a worker's.

The test supplies executors and links; :class:`TimedLink` takes its time over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from molink.facts.dtypes import DType
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.ring.build import RingPlan, RingStage, StageEnvironment, build_ring
from molink.ring.ring import Ring
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.ring.stage import DraftRunner, NextStage, StageRequests, StageShape, StepExecutor
from molink.ring.sub_chunks import SubChunkPolicy
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import Emission
from molink.scheduler.scheduler import Scheduler
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.sim.event_queue import EventQueue
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RingMessage, SamplingParams, Volume, VolumeFragment
from molink.wire.messages.serving import OutputToken
from molinkd.worker.request_table import RequestTable
from tests.support.request_states import make_state


class Link(NextStage, Protocol):
    """A link whose target can be set."""

    to: Ring


@dataclass(frozen=True)
class Stages:
    """Properties that all stages of a ring share; rows have ``hidden`` elements of ``dtype``."""

    hidden: int = 1
    vocabulary: int = 100
    dtype: DType = "u8"
    #: Of each stage; nothing is known of stages beyond.
    profiles: tuple[Profile, ...] = ()
    cut_through: bool = True
    cutting: SubChunkPolicy | None = None
    #: Of each stage, for KV.
    host: HostMemory = NO_HOST_MEMORY
    scheduling_policy: str = "fcfs"


class VirtualRing:
    """A stage per executor, and the bridge receiver of its scheduler, which keeps what is told.

    ``links`` are as many as stages, or none if the only stage is the whole ring.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        executors: Sequence[StepExecutor],
        links: Sequence[Link],
        stages: Stages | None = None,
        requests: Callable[[int], StageRequests] = lambda _: RequestTable(),
        queue: EventQueue | None = None,
        source: Callable[[], DraftSource] = PromptLookup,
        draft_model: DraftRunner | None = None,
    ) -> None:
        self.queue = queue or EventQueue()
        self.errors: list[str] = []
        #: Called with each emission and the time.
        self.on_emission: Callable[[Emission, float], None] = self._keep
        #: Tokens of each prompt, when each request's answers came, and which requests are over.
        self.prompts: dict[str, int] = {}
        self.tokens: dict[str, list[float]] = {}
        self.finished_keys: set[str] = set()
        self._limits = limits
        self._common = stages or Stages()
        self._requests = requests
        self._source = source
        self._draft_model = draft_model
        self.stages = [
            self._make_stage(i, len(executors), each) for i, each in enumerate(executors)
        ]
        self.rings = [seat.ring for seat in self.stages]
        scheduler = self.stages[0].scheduler
        assert scheduler is not None
        self.scheduler: Scheduler = scheduler
        for index, link in enumerate(links):
            link.to = self.rings[(index + 1) % len(self.rings)]
        for index, seat in enumerate(self.stages):
            seat.start(links[index] if links else None)

    def _make_stage(self, index: int, count: int, executor: StepExecutor) -> RingStage:
        common = self._common
        plan = RingPlan(
            epoch=1,
            pipeline="p",
            shape=StageShape(index, count, common.hidden, common.vocabulary, common.dtype),
            scheduler_limits=self._limits,
            max_model_len=self._limits.max_model_len,
            profile=common.profiles[index] if index < len(common.profiles) else UNKNOWN_PROFILE,
            link_policy="fifo",
            cut_through=common.cut_through,
            sub_chunk_policy=common.cutting,
            create_draft_source=self._source,
            host_memory=common.host,
            scheduling_policy=common.scheduling_policy,
        )
        requests = self._requests(index)
        return build_ring(
            plan,
            StageEnvironment(
                self.queue,
                requests,
                executor,
                lambda _: self,
                self.errors.append,
                draft_model=self._draft_model,
            ),
        )

    # --- emission receiver ------------------------------------------------------------------------

    def deliver_emissions(self, emissions: Sequence[Emission], now: float) -> None:
        for emission in emissions:
            self.on_emission(emission, now)

    def _keep(self, emission: Emission, now: float) -> None:
        token = emission.message
        assert isinstance(token, OutputToken)
        assert token.key not in self.finished_keys
        times = self.tokens[token.key]
        assert token.position == self.prompts[token.key] + len(times)
        times.append(now)
        if token.finish_reason is not None:
            self.finished_keys.add(token.key)

    def close(self) -> None:
        raise AssertionError(self.errors)

    # --- clients -----------------------------------------------------------------------------

    def submit_request(self, key: str, prompt: int, answer: int) -> None:
        """Submit a request with ``prompt`` and ``answer`` tokens."""
        self.prompts[key], self.tokens[key] = prompt, []
        tokens, sampling = tuple(range(prompt)), SamplingParams(temperature=0.0)
        request = make_state("d", key, tokens, prompt, answer, sampling, credit_window=1 << 20)
        self.scheduler.submit_request(request, self.queue.now)
        self.rings[0].run_pending()

    def cancel_request(self, key: str) -> None:
        """Cancel a request, unless it has ended."""
        if key not in self.finished_keys:
            self.finished_keys.add(key)
            self.scheduler.cancel_request("d", key, self.queue.now)
            self.rings[0].run_pending()

    # --- time --------------------------------------------------------------------------------

    def run_until(self, until: Callable[[], bool]) -> None:
        """Let time go on until then; something has to happen until then."""
        while not until():
            assert self.queue.run_next(), "nothing happens any more"

    # --- what has to hold --------------------------------------------------------------------

    def check_answers(self) -> None:
        assert not self.errors
        self.scheduler.validate()
        for ring in self.rings:
            ring.scoreboard.validate()

    def check_idle(self) -> None:
        """Check that no request, block or message is left."""
        self.check_answers()
        assert not self.scheduler.live_requests
        assert self.scheduler.num_strays == 0
        _, gauges = self.scheduler.collect_stats()
        assert gauges["scheduler_blocks_used"] == gauges["scheduler_blocks_releasing"] == 0
        for ring in self.rings:
            assert not ring.progress.has_requests
            assert ring.scoreboard.num_waiting == ring.scoreboard.num_queued == 0
            assert ring.scoreboard.num_refused == 0
            assert ring.num_strays == 0
            assert not len(ring._samples)


@dataclass
class TimedLink:
    """Decode rows and control take ``latency`` seconds; prefill rows come at ``rate`` rows/s.

    ``burst`` says how many of these come at a time.
    """

    queue: EventQueue
    latency: float
    rate: float = float("inf")
    burst: Callable[[], int] = lambda: 1 << 16
    cut_through: bool = True
    to: Any = None
    is_full: bool = False
    _free_at: float = 0.0
    #: Volumes on their way: header, room for their rows, rows that have arrived.
    _volumes: dict[int, tuple[Volume, bytearray]] = field(default_factory=dict)
    _arrived: dict[int, int] = field(default_factory=dict)

    def send_control(self, body: RingMessage, payload: Any = None) -> None:
        data = None if payload is None else bytearray(payload)
        self._later(self.latency, lambda: self.to.on_message(body, data))

    def send_volume(self, header: Volume, rows: Any) -> None:
        assert header.payload == Payload("u8", (header.count, 1))
        if not header.prefill:
            self._later(self.latency, lambda: self.to.on_message(header, bytearray(rows)))
            return
        assert header.seq not in self._volumes
        self._volumes[header.seq] = header, bytearray(header.count)
        self._arrived[header.seq] = 0
        self.send_more_rows(header.seq, rows)

    def send_more_rows(self, seq: int, rows: Any) -> None:
        left = len(rows)
        assert left
        while left:
            count = min(left, self.burst())
            self._free_at = max(self._free_at, self.queue.now) + count / self.rate
            self.queue.schedule_at(self._free_at + self.latency, self._arrive, seq, count)
            left -= count

    def _arrive(self, seq: int, count: int) -> None:
        header, room = self._volumes[seq]
        before = self._arrived[seq]
        self._arrived[seq] = after = before + count
        assert after <= len(room)
        if after == len(room):
            del self._volumes[seq]
        if not self.cut_through:
            if after == len(room):
                self.to.on_message(header, room, after)
        elif before:
            payload = Payload("u8", (count, 1))
            self.to.on_message(VolumeFragment(seq, before, payload), None, after)
        else:
            self.to.on_message(header, room, after)

    def handle_event(self, event: Any) -> None:
        pass

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        self.queue.schedule_at(self.queue.now + seconds, event)


@dataclass
class WholeLink:
    """Delivers whole volumes in order, a little later."""

    queue: EventQueue
    to: Any = None
    is_full: bool = False

    def send_control(self, body: RingMessage, payload: Any = None) -> None:
        self._later(body, None if payload is None else bytearray(payload))

    def send_volume(self, header: Volume, rows: Any) -> None:
        assert header.payload.shape[0] == header.count
        self._later(header, bytearray(memoryview(rows).cast("B")))

    def send_more_rows(self, seq: int, rows: Any) -> None:
        raise AssertionError("volumes are whole here")

    def handle_event(self, event: Any) -> None:
        pass

    def _later(self, body: RingMessage, data: bytearray | None) -> None:
        self.queue.schedule_at(self.queue.now + 0.005, self._arrive, body, data)

    def _arrive(self, body: RingMessage, data: bytearray | None) -> None:
        assert isinstance(self.to, Ring)
        self.to.on_message(body, data)
