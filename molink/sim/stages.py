"""A stage that computes nothing but takes its time."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from molink.facts.drafts import MAX_DRAFTS
from molink.ring.stage import StageShape
from molink.ring.work import BlockCopy, Segment, SegmentResult, StepDone
from molink.sim.agenda import Agenda
from molink.sim.pc import Pc
from molink.sim.roofline import Roofline, StepRows
from molink.wire.messages.data import Admit, Choice, Forced, Rows, Sampled, Volume

#: Told of every step: begin, seconds, decode rows, prefill rows.
OnStep = Callable[[float, float, int, int], None]
#: The token of a request at a position.
TokenAt = Callable[[int, int], int]
#: The tokens of a request that have to come from a position on.
ForcedAt = Callable[[int, int], Sequence[int]]


class NoRequests:
    """Which requests live at a stage: nothing else is needed where nothing is computed."""

    def __init__(self) -> None:
        #: With the seed of each.
        self._live: dict[int, int] = {}
        #: Position and token of each that were sampled last.
        self.last: dict[int, tuple[int, int]] = {}

    def admit(self, message: Admit) -> None:
        """A request begins."""
        self._live[message.request] = message.sampling.seed

    def seed(self, request: int) -> int:
        """That of a request that lives."""
        return self._live[request]

    def history(self, request: int, first: int, ids: memoryview) -> None:
        """Not kept."""

    def grammar(self, request: int, text: bytes) -> None:
        """Not kept."""

    def table(self, request: int, blocks: Sequence[int]) -> None:
        """Not kept."""

    def release(self, request: int) -> None:
        """A request is over."""
        self._live.pop(request, None)
        self.last.pop(request, None)

    def __len__(self) -> int:
        return len(self._live)


def step_rows(volumes: Iterable[Volume], is_last: bool) -> StepRows:
    """What a step over ``volumes`` computes; only the last stage samples."""
    decode = decode_context = prefill = prefill_context = sampled = 0
    for volume in volumes:
        for rows in volume.rows:
            count = rows.count
            if volume.prefill:
                prefill += count
                prefill_context += count * rows.start + count * (count + 1) // 2
            else:
                decode += count
                decode_context += count * rows.start
            sampled += (1 + len(rows.checked)) * (rows.sample and is_last)
    return StepRows(decode, decode_context, prefill, prefill_context, sampled)


class SimExecutor:
    """Runs each step for as long as roofline and PC say.

    Rows are views of ``zeros``, which has to be long enough for the largest volume. ``token`` says
    what is sampled for a request at a position, ``forced`` what has to be.

    Copies from and to host memory run beside steps, one after the other, ``block_s`` seconds for a
    block. A step waits for those of blocks that it uses.
    """

    def __init__(
        self,
        agenda: Agenda,
        stage: StageShape,
        roofline: Roofline,
        zeros: memoryview,
        pc: Pc,
        requests: NoRequests,
        token: TokenAt = lambda request, position: 0,
        forced: ForcedAt = lambda request, position: (),
        block_s: float = 0.0,
    ) -> None:
        self._agenda = agenda
        self._is_last = stage.is_last
        self._row_bytes = stage.row_bytes
        self._roofline = roofline
        self._zeros = zeros
        self._pc = pc
        self._requests = requests
        self._token = token
        self._forced = forced
        self._block_s = block_s
        #: When the step that runs ends, and when all copies that were begun do.
        self._step_end = self._copies_end = 0.0
        #: When a request's blocks are back, and when blocks that have been given up are copied.
        self._back_at: dict[int, float] = {}
        self._out_at: dict[int, float] = {}
        #: Seconds that steps have waited for copies.
        self.waited_s = 0.0
        self.on_step: OnStep | None = None

    def swap(self, copy: BlockCopy) -> None:
        """Begin to copy when the step that runs is over, and copies before are."""
        begin = max(self._agenda.now, self._step_end, self._copies_end)
        self._copies_end = end = begin + self._block_s * len(copy.blocks)
        if copy.out:
            self._out_at.update(dict.fromkeys(copy.blocks, end))
        else:
            self._back_at[copy.request] = end

    def submit(self, segments: Sequence[Segment], done: Callable[[StepDone], None]) -> None:
        """Begin a step."""
        size = step_rows([segment.volume for segment in segments], self._is_last)
        now = self._agenda.now
        wait = self._wait_s(segments, now)
        self.waited_s += wait
        seconds = wait + self._pc.begin(self._roofline.step_s(size), now + wait)
        self._step_end = now + seconds
        if self.on_step is not None:
            self.on_step(now, seconds, size.decode, size.prefill)
        self._agenda.at(now + seconds, self._end, segments, done, seconds)

    def _wait_s(self, segments: Sequence[Segment], now: float) -> float:
        """Seconds until all blocks of a step are copied."""
        if self._copies_end <= now:
            self._back_at.clear()
            self._out_at.clear()
            return 0.0
        groups = [rows for segment in segments for rows in segment.volume.rows]
        ends = [self._back_at.get(rows.request, now) for rows in groups]
        ends += [self._out_at.get(block, now) for rows in groups for block in rows.blocks]
        return max(0.0, max(ends, default=now) - now)

    def _end(
        self, segments: Sequence[Segment], done: Callable[[StepDone], None], seconds: float
    ) -> None:
        done(StepDone([self._result(segment) for segment in segments], seconds, None))

    def _result(self, segment: Segment) -> SegmentResult:
        volume = segment.volume
        if not self._is_last:
            return SegmentResult(volume, self._zeros[: volume.count * self._row_bytes], None)
        choices = [choice for rows in volume.rows if rows.sample for choice in self._sample(rows)]
        forced = tuple(self._follow(choices))
        return SegmentResult(volume, None, Sampled(volume.tick, tuple(choices), (), forced))

    def _sample(self, rows: Rows) -> Iterator[Choice]:
        """A token after the last row; with drafts, up to the first that is another one."""
        last = self._requests.last
        if not rows.follows(*last.get(rows.request, (-1, -1))):
            return
        first = rows.start + rows.count - len(rows.checked)
        for position, draft in enumerate((*rows.checked, None), first):
            token = self._token(rows.request, position)
            last[rows.request] = position, token
            yield Choice(rows.request, position, token)
            if token != draft:
                return

    def _follow(self, choices: Sequence[Choice]) -> Iterator[Forced]:
        """What has to follow the last choice of each request."""
        for request, position in {each.request: each.position for each in choices}.items():
            tokens = self._forced(request, position + 1)[:MAX_DRAFTS]
            if tokens:
                yield Forced(request, tuple(tokens))
