"""Endless streams with known texts."""

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from tools.chaos.pc import Pc
from tools.chaos.swarm import Swarm

#: Seconds without a token after which a stream counts as lost.
SILENCE_S = 180.0
#: Seconds before a slot retries a failed request.
_AGAIN_S = 0.2
#: Seconds within which pieces of two streams count as simultaneous.
_BESIDE_S = 0.5
#: Pieces remembered per stream for that.
_REMEMBERED = 1024

_QUESTIONS = (
    "What is molink?",
    "How do I add a PC?",
    "Who are you?",
    "What is the capital of France?",
    "What is 7 plus 5?",
    "Count from 1 to 30.",
    "Tell me a story about a swarm.",
    "Explain how molink works in detail.",
    "What is a stage?",
    "What does the head do?",
    "What happens when a PC dies?",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Name the days of the week.",
    "Is molink private?",
    "Why does decode go first?",
)

#: ``same``: the whole expected text. ``endpoint``: the asked PC was killed.
End = Literal["same", "changed", "lost", "endpoint"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request; times are monotonic seconds."""

    slot: int
    pc: str
    begun: float
    ended: float
    end: End
    tokens: int
    #: Description of a failure.
    trouble: str = ""
    #: When its first wrong piece arrived; 0 if none.
    wrong_at: float = 0.0


#: Arrival of a piece of text, monotonic seconds, and the piece.
TimedPiece = tuple[float, str]


@dataclass(slots=True)
class Slot:
    """One of the permanent streams and the times of its pieces."""

    index: int
    pc: Pc
    #: Per request: send time, then times of its pieces.
    series: list[list[float]] = field(default_factory=list)
    pieces: int = 0
    #: Its latest pieces over all requests.
    recent_pieces: deque[TimedPiece] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def pause(self, begun: float, ended: float) -> float:
        """Longest silence that overlaps ``begun`` to ``ended``."""
        ending = (pair for times in self.series for pair in itertools.pairwise(times))
        return max((b - a for a, b in ending if b > begun and a < ended), default=0.0)


class StreamFailed(Exception):
    """An answer is incomplete."""


class Load:
    """``count`` streams over all PCs during an ``async with`` block.

    Streams are greedy in f32, so their texts are deterministic.
    """

    def __init__(
        self, swarm: Swarm, count: int, tokens: int, *, pcs: Sequence[Pc] | None = None
    ) -> None:
        """``tokens`` per answer; ``pcs``: the endpoints to ask, all by default."""
        self._swarm = swarm
        self._pcs = list(pcs or swarm.pcs)
        self._tokens = tokens
        self._expected: dict[str, str] = {}
        self.slots = [Slot(n, self._pcs[n % len(self._pcs)]) for n in range(count)]
        self.answers: list[Answer] = []
        #: Deaths of each PC when it was last ready.
        self._ready = dict.fromkeys((pc.name for pc in self._pcs), 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def __aenter__(self) -> Self:
        limits = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        await self._record_answers()
        self._tasks = [asyncio.create_task(self._keep_asking(slot)) for slot in self.slots]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def finish(self) -> None:
        """Finish running answers and send no more."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _record_answers(self) -> None:
        """Record each prompt's answer before any fault."""
        prompts = [self._make_prompt(slot.index) for slot in self.slots]

        async def whole(slot: Slot, prompt: str) -> str:
            return "".join([piece async for piece in self._stream_answer(slot.pc, prompt)])

        texts = [whole(slot, p) for slot, p in zip(self.slots, prompts, strict=True)]
        self._expected = dict(zip(prompts, await asyncio.gather(*texts), strict=True))

    @staticmethod
    def _make_prompt(index: int) -> str:
        question = _QUESTIONS[index % len(_QUESTIONS)]
        return question if index < len(_QUESTIONS) else f"{question} ({index})"

    def progress(self) -> list[int]:
        """Count pieces per slot."""
        return [slot.pieces for slot in self.slots]

    async def advance(self, pieces: int, timeout: float) -> bool:
        """Wait until every slot received ``pieces`` more; ``False`` on timeout."""
        wanted = [count + pieces for count in self.progress()]
        deadline = time.monotonic() + timeout
        while any(now < then for now, then in zip(self.progress(), wanted, strict=True)):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _keep_asking(self, slot: Slot) -> None:
        while not self._stopping:
            slot.pc = await self._choose_pc(slot.index)
            answer = await self._run_answer(slot)
            self.answers.append(answer)
            if answer.end in ("lost", "endpoint"):
                await asyncio.sleep(_AGAIN_S)

    async def _choose_pc(self, index: int) -> Pc:
        """The slot's own PC, or the next one while that is down."""
        pcs = self._pcs
        order = [pcs[(index + step) % len(pcs)] for step in range(len(pcs))]
        while True:
            for pc in order:
                if pc.running and (pc.deaths == self._ready[pc.name] or await self._is_back(pc)):
                    return pc
            await asyncio.sleep(_AGAIN_S)

    async def _is_back(self, pc: Pc) -> bool:
        """Whether a restarted PC is ready."""
        deaths = pc.deaths
        try:
            async with self._session.get(f"{pc.url}/readyz") as answer:
                ready = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
        if ready:
            self._ready[pc.name] = deaths
        return ready

    async def _run_answer(self, slot: Slot) -> Answer:
        pc, deaths = slot.pc, slot.pc.deaths
        expected = self._expected[self._make_prompt(slot.index)]
        begun = time.monotonic()
        times = [begun]
        received: list[TimedPiece] = []
        slot.series.append(times)
        end: End = "same"
        trouble = ""
        try:
            async for piece in self._stream_answer(pc, self._make_prompt(slot.index)):
                times.append(time.monotonic())
                received.append((times[-1], piece))
                slot.recent_pieces.append(received[-1])
                slot.pieces += 1
        except (aiohttp.ClientError, StreamFailed, TimeoutError) as error:
            end, trouble = "lost", f"{type(error).__name__}: {error}"
        if end == "lost" and (pc.deaths > deaths or not pc.running):
            end = "endpoint"
        text = "".join(piece for _, piece in received)
        wrong_at = 0.0
        if not expected.startswith(text) or (end == "same" and text != expected):
            end, trouble = "changed", _describe_difference(expected, text)
            if (index := find_first_wrong(expected, received)) is not None:
                others = [other for other in self.slots if other is not slot]
                trouble += f"; {describe_circumstances(received, index, begun, others)}"
                wrong_at = received[index][0]
        ended = time.monotonic()
        answer = Answer(slot.index, pc.name, begun, ended, end, len(received), trouble, wrong_at)
        if end == "lost":
            times.append(ended)  # it was silent until then
        return answer

    async def _stream_answer(self, pc: Pc, prompt: str) -> AsyncIterator[str]:
        """Yield the pieces of one answer, or raise :class:`StreamFailed`."""
        body: dict[str, Any] = {
            "model": self._swarm.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        count = done = None
        async with self._session.post(f"{pc.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise StreamFailed(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for event in _read_events(response):
                if event is None:
                    done = True
                    break
                if "error" in event:
                    raise StreamFailed(str(event["error"]))
                count = (event.get("usage") or {}).get("completion_tokens", count)
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece
        if not done or count != self._tokens:
            raise StreamFailed(f"it ended after {count} of {self._tokens} tokens")


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """Yield server-sent events, ``None`` for ``[DONE]``, or raise :class:`StreamFailed`."""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            yield None
        elif line.startswith(b"data: "):
            try:
                yield json.loads(line[6:])
            except ValueError as error:
                raise StreamFailed(f"malformed event: {error}: {line[:200]!r}") from None


def find_first_wrong(expected: str, received: Sequence[TimedPiece]) -> int | None:
    """Index of the first piece that departs from ``expected``; ``None`` if none does."""
    at = 0
    for index, (_, piece) in enumerate(received):
        if not expected.startswith(piece, at):
            return index
        at += len(piece)
    return None


def describe_circumstances(
    received: Sequence[TimedPiece], index: int, begun: float, others: Iterable[Slot]
) -> str:
    """Describe a wrong piece: the pause before it, and other streams with the same piece then.

    A long pause suggests a recovery; the same piece elsewhere suggests a swapped row or token.
    """
    at, piece = received[index]
    before = received[index - 1][0] if index else begun
    beside = [
        f"stream {slot.index} at {slot.pc.name} {when - at:+.3f} s"
        for slot in others
        for when, other in slot.recent_pieces
        if other == piece and abs(when - at) <= _BESIDE_S
    ]
    return (
        f"wrong is piece {index}, {piece!r}, {at - before:.3f} s after the one before;"
        f" the same piece at {', '.join(beside) or 'no other stream'}"
    )


def _describe_difference(expected: str, text: str) -> str:
    """Describe where two texts differ."""
    at = next(
        (n for n, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b),
        min(len(expected), len(text)),
    )
    shown = slice(max(0, at - 20), at + 40)
    return f"at character {at} {text[shown]!r} rather than {expected[shown]!r}"
