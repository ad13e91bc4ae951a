"""A stand-in for a daemon: submits planned requests and times their tokens."""

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq.asyncio

from molink.bench.report import Sample
from molink.bench.workload import PlannedRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import (
    Credit,
    OutputTokens,
    PromptFragment,
    Rejected,
    Request,
    Submit,
)
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair
from tools.emulation.ring import EPOCH, PIPELINE, Member

CONNECT_S = 30.0
#: Tokens between credits; the scheduler may be five times as many ahead.
_CREDIT_TOKENS = 64
_WINDOW = 5 * _CREDIT_TOKENS


@dataclass(slots=True)
class Answer:
    """One request and its token times on the run's clock."""

    request: PlannedRequest
    sent: float
    times: list[float] = field(default_factory=list)
    credited: int = 0
    error: str | None = None
    over: bool = False

    def sample(self) -> Sample:
        """Its sample; an unfinished request counts with the tokens so far."""
        error = self.error
        if error is None and not self.times:
            error = "no token in time"
        return Sample(
            sent_at=self.sent,
            piece_times=tuple(self.times),
            finished_at=self.times[-1] if self.times else 0.0,
            input_tokens=self.request.input_tokens,
            output_tokens=len(self.times),
            error=error,
        )


class Load:
    """Submits requests and collects their tokens."""

    def __init__(self, client: Client[DataMessage], vocabulary: int, seed: int) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._seed = seed
        self._began = time.monotonic()
        self._changed = asyncio.Event()
        self.answers: dict[str, Answer] = {}

    def begin(self) -> None:
        """Start the run's clock."""
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def on_message(self, message: DataMessage, _: memoryview | None) -> None:
        """Handle a message of the scheduler."""
        now = self.now
        match message:
            case OutputTokens():
                for token in message.tokens:
                    self._add_token(self.answers[token.key], token.finish_reason is not None, now)
            case Rejected():
                answer = self.answers[message.key]
                answer.error, answer.over = f"{message.reason}: {message.message}", True
        self._changed.set()

    def submit(self, request: PlannedRequest) -> None:
        """Send one request with a unique prompt."""
        key = f"r{request.index}"
        self.answers[key] = Answer(request, self.now)
        count = request.input_tokens
        source = random.Random(self._seed * 1_000_003 + request.index)
        ids = array("i", [source.randrange(self._vocabulary) for _ in range(count)])
        wanted = Request(
            model="",
            prompt_token_ids=(),
            max_tokens=request.output_tokens,
            sampling_params=SamplingParams(temperature=0.0),
        )
        self._client.send(Submit(PIPELINE, EPOCH, key, wanted, count, count, credit_window=_WINDOW))
        self._client.send(PromptFragment(key, 0, Payload("i32", (count,))), ids.tobytes())

    async def all_over(self) -> None:
        """Wait until every request has ended."""
        while not all(answer.over for answer in self.answers.values()):
            self._changed.clear()
            await self._changed.wait()

    def _add_token(self, answer: Answer, last: bool, now: float) -> None:
        answer.times.append(now)
        answer.over = last
        done = len(answer.times)
        if done - answer.credited >= _CREDIT_TOKENS:
            answer.credited = done
            position = answer.request.input_tokens + done
            self._client.send(Credit(f"r{answer.request.index}", position))


@asynccontextmanager
async def load_on(
    first: Member, keys: KeyPair, vocabulary: int, seed: int = 0
) -> AsyncIterator[Load]:
    """Connect to a ring's scheduler as a daemon does."""
    context = zmq.asyncio.Context()
    load: Load | None = None

    def on_message(message: DataMessage, payload: memoryview | None) -> None:
        assert load is not None
        load.on_message(message, payload)

    client = Client(
        context,
        keys,
        data_codec(),
        first.keys.public,
        [f"tcp://{first.host.address}:{first.port}"],
        events=ClientEvents(on_message=on_message),
    )
    load = Load(client, vocabulary, seed)
    client.start()
    try:
        await client.wait_connected(CONNECT_S)
        yield load
    finally:
        await client.close()
        context.term()


async def run_load(
    load: Load, plan: Sequence[PlannedRequest], until: float | None = None
) -> list[Answer]:
    """Submit ``plan`` on time; return after the last answer or ``until`` seconds."""
    load.begin()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(until):
            for request in plan:
                await asyncio.sleep(max(0.0, request.arrival_s - load.now))
                load.submit(request)
            await load.all_over()
    return list(load.answers.values())
