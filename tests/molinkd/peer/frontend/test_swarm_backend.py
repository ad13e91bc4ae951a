"""The API's backend with fake schedulers."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec import structs

from molink.errors import ModelNotFound, MolinkError, Overloaded, RequestError, Unavailable
from molink.routing.cache_report import SPAN_TOKENS, CacheReport, pack_report
from molink.swarm.frontend.stream import PipelineEpoch, StreamLimits
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.instructions import Route
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    OutputToken,
    OutputTokens,
    PooledOutput,
    PromptFragment,
    Rejected,
    Request,
    Submit,
)
from molinkd.api.backend import Backend, MetricValues, ServedModel
from molinkd.peer.frontend import swarm_backend as streams
from molinkd.peer.frontend.swarm_backend import (
    MAX_FRAGMENT_IDS,
    RunningClock,
    SwarmBackend,
    split_prompt,
)

MODEL = ServedModel("m", Path(), 128, 0)
ROUTE = Route(pipeline="p1", epoch=1, model="m", is_ready=False, scheduler=None, max_model_len=128)


class FakeSchedulers:
    """Schedulers as a list of targets; records the sent messages."""

    def __init__(self) -> None:
        self.usable: list[PipelineEpoch] = [PipelineEpoch("p1", 1)]
        self.sent: list[DataMessage] = []
        self.on_send: Callable[[DataMessage], None] = lambda _: None
        self.error: MolinkError | None = None
        self.sign = 0

    @property
    def routes(self) -> list[Route]:
        others = [one for one in self.usable if one.pipeline != "p1"]
        return [ROUTE, *(structs.replace(ROUTE, pipeline=one.pipeline) for one in others)]

    def forming_progress(self, model: str) -> int:
        return self.sign

    def unready_reason(self, model: str) -> str:
        return ""

    def ready_targets(self, model: str) -> list[PipelineEpoch]:
        return list(self.usable) if model == "m" else []

    def send(
        self, target: PipelineEpoch, message: DataMessage, payload: bytes | None = None
    ) -> None:
        if target not in self.usable:
            raise Unavailable("gone")
        if self.error is not None:
            raise self.error
        data_codec().encode(message, payload)
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(self.on_send, message)


@pytest.fixture
def schedulers() -> FakeSchedulers:
    return FakeSchedulers()


@pytest.fixture
async def clock() -> AsyncIterator[RunningClock]:
    clock = RunningClock(asyncio.get_running_loop())
    yield clock
    clock.close()


async def tell_status() -> bytes:
    return b"{}"


@pytest.fixture
async def requests(schedulers: FakeSchedulers, clock: RunningClock) -> SwarmBackend:
    limits = StreamLimits(pipeline_wait_timeout=5.0, credit_window=8)
    requests = SwarmBackend(
        schedulers, limits, lambda: MetricValues({"a": 1.0}), clock, tell_status
    )
    requests.set_models([MODEL])
    return requests


def ask(max_tokens: int = 4, model: str = "m") -> Request:
    return Request(model, (1, 2, 3), max_tokens, SamplingParams(seed=1))


def answering(
    requests: SwarmBackend, schedulers: FakeSchedulers, count: int
) -> Callable[[DataMessage], None]:
    """A scheduler that answers every submission with tokens 100, 101, … from its position on."""

    def answer(message: DataMessage) -> None:
        if not isinstance(message, Submit):
            return
        last = 3 + count - 1
        for position in range(message.num_tokens, last + 1):
            finish = "length" if position == last else None
            token = OutputToken(
                message.epoch, message.key, position, 97 + position, finish_reason=finish
            )
            requests.on_message(message.pipeline, OutputTokens((token,)))

    return answer


async def collect(backend: Backend, request: Request) -> list[int]:
    return [token.token async for token in backend.generate(request)]


async def test_an_answer(requests: SwarmBackend, schedulers: FakeSchedulers) -> None:
    schedulers.on_send = answering(requests, schedulers, 4)
    assert await collect(requests, ask()) == [100, 101, 102, 103]
    assert [type(message) for message in schedulers.sent[:2]] == [Submit, PromptFragment]
    await asyncio.sleep(0)
    counters, gauges = requests.collect_metrics().counters, requests.collect_metrics().gauges
    assert counters["daemon_requests_started"] == 1.0
    assert counters["a"] == 1.0
    assert gauges["daemon_requests_active"] == 0


async def test_a_request_keeps_waiting_while_a_pipeline_forms(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.on_send = answering(requests, schedulers, 4)
    schedulers.usable = []
    asked = asyncio.create_task(collect(requests, ask()))
    for _ in range(3):  # until it runs and has reached this loop
        await asyncio.sleep(0)
    (active,) = requests._active.values()
    before = active.stream.next_wake_at
    schedulers.sign = 1
    requests.on_targets_changed("m")
    assert before is not None
    assert active.stream.next_wake_at is not None
    assert active.stream.next_wake_at > before
    schedulers.usable = [PipelineEpoch("p1", 2)]
    requests.on_targets_changed("m")
    assert await asked == [100, 101, 102, 103]


async def test_requests_from_another_thread(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.on_send = answering(requests, schedulers, 4)
    answers: list[list[int]] = []

    def run() -> None:
        answers.append(asyncio.run(collect(requests, ask())))

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert answers == [[100, 101, 102, 103]]


async def test_a_lost_scheduler_pauses_the_stream(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    def half(message: DataMessage) -> None:
        if isinstance(message, Submit):
            for position in (3, 4):
                requests.on_message(
                    "p1", OutputTokens((OutputToken(1, message.key, position, 97 + position),))
                )

    schedulers.on_send = half
    stream = requests.generate(ask())
    first = [await anext(stream), await anext(stream)]
    schedulers.usable = []
    requests.on_targets_changed("m")
    assert not requests.is_ready("m")
    schedulers.usable = [PipelineEpoch("p1", 2)]
    schedulers.on_send = answering(requests, schedulers, 4)
    requests.on_targets_changed("m")
    assert requests.is_ready()
    rest = [token async for token in stream]
    assert [token.token for token in (*first, *rest)] == [100, 101, 102, 103]
    assert [token.position for token in (*first, *rest)] == [3, 4, 5, 6]
    again = [message for message in schedulers.sent if isinstance(message, Submit)][1]
    assert (again.epoch, again.num_tokens, again.num_prompt_tokens) == (2, 5, 3)


async def test_closing_the_stream_cancels_the_request(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    def one(message: DataMessage) -> None:
        if isinstance(message, Submit):
            requests.on_message("p1", OutputTokens((OutputToken(1, message.key, 3, 100),)))

    schedulers.on_send = one
    stream = requests.generate(ask())
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)
    assert isinstance(schedulers.sent[-1], Cancel)
    await asyncio.sleep(0)
    assert requests.collect_metrics().counters["daemon_requests_cancelled"] == 1.0


async def test_consumed_tokens_are_credited(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.on_send = answering(requests, schedulers, 6)
    stream = requests.generate(ask(max_tokens=20))
    for _ in range(5):
        await anext(stream)
    await anext(stream)
    await asyncio.sleep(0)
    assert not [message for message in schedulers.sent if isinstance(message, Credit)]
    await stream.aclose()


async def test_rejections_reach_the_client(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    def refuse(message: DataMessage) -> None:
        if isinstance(message, Submit):
            requests.on_message("p1", Rejected(1, message.key, "overloaded", "full", 2.0))

    schedulers.on_send = refuse
    with pytest.raises(Overloaded, match="full"):
        await collect(requests, ask())
    with pytest.raises(ModelNotFound):
        await collect(requests, ask(model="other"))


async def test_a_full_connection_is_an_overload(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.error = Overloaded("full", 1.0)
    with pytest.raises(Overloaded, match="congested"):
        await collect(requests, ask())


async def test_an_oversized_header_is_the_clients_error(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    bias = tuple((10**8 + n, float(n) + 0.1) for n in range(256))
    stops = tuple(10**8 + n for n in range(64))
    request = Request("m", (1, 2), 4, SamplingParams(seed=1, logit_bias=bias), stops)
    with pytest.raises(RequestError, match=r"logit_bias.*stop_token_ids"):
        await collect(requests, request)


async def test_a_broken_connection_pauses_the_stream(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.error = Unavailable("not connected")
    schedulers.on_send = answering(requests, schedulers, 2)

    def mended() -> None:
        schedulers.error = None

    asyncio.get_running_loop().call_later(0.05, mended)
    assert await collect(requests, ask(2)) == [100, 101]


class StillClock:
    """A clock that only the test moves, and whose timers never go off."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: object, *args: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(3600, lambda: None)


async def test_a_request_fails_fast_after_a_timeout_of_others(schedulers: FakeSchedulers) -> None:
    clock = StillClock()
    limits = StreamLimits(pipeline_wait_timeout=30.0)
    requests = SwarmBackend(schedulers, limits, MetricValues, clock, tell_status)  # type: ignore[arg-type]
    requests.set_models([MODEL])
    schedulers.usable = []
    requests.on_targets_changed("m")
    clock.now = 31.0
    requests.on_targets_changed("m")  # no change
    with pytest.raises(Unavailable, match="for 31 s"):
        await asyncio.wait_for(collect(requests, ask()), 60)
    schedulers.sign = 1  # a pipeline is being formed, so waiting is worthwhile
    requests.on_targets_changed("m")
    hopeful = asyncio.create_task(collect(requests, ask(2)))
    await asyncio.sleep(0.01)
    assert not hopeful.done()
    schedulers.on_send = answering(requests, schedulers, 2)
    schedulers.usable = [PipelineEpoch("p1", 1)]
    requests.on_targets_changed("m")
    assert await asyncio.wait_for(hopeful, 60) == [100, 101]
    requests.close()


async def test_the_status_runs_on_the_daemons_loop(
    schedulers: FakeSchedulers, clock: RunningClock
) -> None:
    daemon = asyncio.get_running_loop()

    async def status() -> bytes:
        assert asyncio.get_running_loop() is daemon
        return b'{"swarm": "s"}'

    requests = SwarmBackend(schedulers, StreamLimits(), MetricValues, clock, status)
    assert await asyncio.to_thread(asyncio.run, requests.fetch_status()) == b'{"swarm": "s"}'


async def test_a_slow_status_times_out(
    schedulers: FakeSchedulers, clock: RunningClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_STATUS_S", 0.01)
    asked = asyncio.Event()

    async def status() -> bytes:
        await asked.wait()
        return b""

    requests = SwarmBackend(schedulers, StreamLimits(), MetricValues, clock, status)
    with pytest.raises(Unavailable, match="too busy"):
        await requests.fetch_status()


async def test_no_scheduler(schedulers: FakeSchedulers, clock: RunningClock) -> None:
    requests = SwarmBackend(
        schedulers, StreamLimits(pipeline_wait_timeout=0.0), MetricValues, clock, tell_status
    )
    requests.set_models([MODEL])
    schedulers.usable = []
    requests.on_targets_changed("m")
    assert not requests.is_ready()
    with pytest.raises(Unavailable, match="no pipeline"):
        await collect(requests, ask())


async def test_prompts_with_a_cached_prefix_go_to_its_pipeline(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.usable = [PipelineEpoch("p1", 1), PipelineEpoch("p2", 1)]
    served: list[str] = []
    shared = tuple(range(1, 2 * SPAN_TOKENS + 1))

    def answer(message: DataMessage) -> None:
        if isinstance(message, Submit):
            served.append(message.pipeline)
            assert (message.cache_version is not None) == (len(schedulers.usable) > 1)
            token = OutputToken(1, message.key, message.num_tokens, 7, finish_reason="length")
            if len(served) == 3:
                schedulers.usable.remove(PipelineEpoch(message.pipeline, 1))
                requests.on_targets_changed("m")
                return
            news, digests = pack_report(CacheReport(len(served), False))
            tokens = OutputTokens((token,), news, Payload("u8", (len(digests),)))
            requests.on_message(message.pipeline, tokens, memoryview(digests))

    schedulers.on_send = answer
    for own in (7, 8, 9, 10):
        request = Request("m", (*shared, own), 1, SamplingParams(seed=1))
        assert await asyncio.wait_for(collect(requests, request), 60) == [7]
    one, other = {"p1", "p2"}, {"p1", "p2"} - {served[0]}
    assert {served[0], *other} == one
    # The third request is lost with its pipeline and moves to the other one, as do all later ones.
    assert served == [served[0]] * 3 + [*other] * 2
    await asyncio.sleep(0)
    counters = requests.collect_metrics().counters
    assert (counters["daemon_routes_explored"], counters["daemon_routes_exploited"]) == (1, 2)


async def test_the_row_of_an_embedding_comes_with_its_token(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    def answer(message: DataMessage) -> None:
        if isinstance(message, Submit):
            row = PooledOutput(1, message.key, Payload("f32", (2,)))
            token = OutputToken(1, message.key, 3, 0, finish_reason="length")
            requests.on_message("p1", row, memoryview(b"12345678"))
            requests.on_message("other", row, memoryview(b"elsewhere"))
            other = structs.replace(row, payload=Payload("u8", (8,)))
            requests.on_message("p1", other, memoryview(b"no floats"))
            requests.on_message("p1", OutputTokens((token,)))

    schedulers.on_send = answer
    (token,) = [token async for token in requests.generate(ask(1))]
    assert token.pooled == b"12345678"


async def test_tokens_of_another_pipeline_are_ignored(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    def foul(message: DataMessage) -> None:
        if isinstance(message, Submit):
            requests.on_message("other", OutputTokens((OutputToken(1, message.key, 3, 666),)))
            requests.on_message("p1", OutputTokens((OutputToken(1, "nobody.1", 3, 666),)))
            requests.on_message("p1", message)

    schedulers.on_send = foul
    stream = requests.generate(ask())
    waiting = asyncio.create_task(anext(stream))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()


async def test_the_least_busy_pipeline_is_chosen(
    requests: SwarmBackend, schedulers: FakeSchedulers
) -> None:
    schedulers.usable = [PipelineEpoch("p1", 1), PipelineEpoch("p2", 1)]
    streams = [requests.generate(ask()) for _ in range(4)]
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    for _ in range(20):
        await asyncio.sleep(0)
    used = sorted(m.pipeline for m in schedulers.sent if isinstance(m, Submit))
    assert used == ["p1", "p1", "p2", "p2"]
    requests.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_long_prompts_are_split() -> None:
    parts = list(split_prompt("k.1", range(MAX_FRAGMENT_IDS + 5)))
    assert [(p.first, p.payload.shape) for p, _ in parts] == [
        (0, (MAX_FRAGMENT_IDS,)),
        (MAX_FRAGMENT_IDS, (5,)),
    ]
    assert struct.unpack("<5i", parts[1][1]) == tuple(range(MAX_FRAGMENT_IDS, MAX_FRAGMENT_IDS + 5))
