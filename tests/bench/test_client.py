import socket

import pytest

from molink.bench.client import BenchClient, BenchTarget, Calibration, make_prompt
from molink.bench.runner import MonotonicClock
from molink.bench.workload import PlannedRequest
from molink.errors import Unavailable, UsageError
from tests.support.fake_openai import FakeOpenAI

REQUEST = PlannedRequest(index=0, arrival_s=0.0, input_tokens=51, output_tokens=4)


def client(url: str, **options: bool | str) -> BenchClient:
    return BenchClient(BenchTarget(url, **options), MonotonicClock())


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_measured_answer(fake: FakeOpenAI, url: str, suffix: str) -> None:
    async with client(url + suffix, api_key="secret") as bench:
        assert await bench.calibrate_prompts()
        assert bench.model == "toy"
        sample = await bench.send(REQUEST)
    assert sample.error is None
    # The probes reveal the fake's template and tokenizer.
    assert (sample.input_tokens, sample.output_tokens, len(sample.piece_times)) == (51, 4, 4)
    assert sample.sent_at <= sample.first_at <= sample.finished_at
    body = fake.bodies[-1]
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert fake.keys == {"Bearer secret"}


async def test_plain_completions_without_ignore_eos(fake: FakeOpenAI, url: str) -> None:
    async with client(url, api="completions", ignore_eos=False, model="other") as bench:
        await bench.calibrate_prompts()
        sample = await bench.send(REQUEST)
    assert (sample.input_tokens, sample.output_tokens) == (52, 4)
    assert "prompt" in fake.bodies[-1]
    assert all("ignore_eos" not in body and body["model"] == "other" for body in fake.bodies)


async def test_a_server_without_usage(fake: FakeOpenAI, url: str) -> None:
    fake.with_usage = False
    async with client(url) as bench:
        assert not await bench.calibrate_prompts()
        sample = await bench.send(REQUEST)
    assert sample.output_tokens == 4


async def test_prompts_differ_from_request_to_request(fake: FakeOpenAI, url: str) -> None:
    async with client(url, model="toy") as bench:
        for index in (0, 1, 0):
            await bench.send(PlannedRequest(index, 0.0, 20, 1))
    first, second, again = (body["messages"][0]["content"] for body in fake.bodies)
    assert first == again
    assert first != second


async def test_failures_are_recorded_in_the_sample(fake: FakeOpenAI, url: str) -> None:
    fake.refused = {1}
    fake.cut = {2}
    async with client(url, model="toy") as bench:
        refused = await bench.send(REQUEST)
        cut = await bench.send(REQUEST)
    assert refused.error == "HTTP 429: queues are full"
    assert cut.error == "the stream ended before the answer was complete"


async def test_an_unreachable_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with client(address) as bench:
            with pytest.raises(Unavailable, match=r"can't reach http.*is --url right"):
                await bench.calibrate_prompts()
            assert (await bench.send(REQUEST)).error


@pytest.mark.parametrize("address", ["nonsense", "ftp://x/y", "http://"])
async def test_an_invalid_url(address: str) -> None:
    async with client(address) as bench:
        with pytest.raises(UsageError, match="--url"):
            await bench.calibrate_prompts()


async def test_a_missing_route(url: str) -> None:
    async with client(f"{url}/elsewhere") as bench:
        with pytest.raises(UsageError, match="HTTP 404"):
            await bench.calibrate_prompts()


async def test_a_server_without_models(fake: FakeOpenAI, url: str) -> None:
    fake.models = []
    async with client(url) as bench:
        with pytest.raises(Unavailable, match="serves no model"):
            await bench.calibrate_prompts()


async def test_a_rejected_parameter_is_reported_before_the_run(fake: FakeOpenAI, url: str) -> None:
    fake.reject_ignore_eos = True
    async with client(url) as bench:
        with pytest.raises(UsageError, match="unknown field ignore_eos"):
            await bench.calibrate_prompts()


def test_calibration() -> None:
    learnt = Calibration.from_probes(short_tokens=8 * 3 + 20, long_tokens=72 * 3 + 20)
    assert learnt == Calibration(3.0, 20.0)
    assert learnt.words_for_tokens(320) == 100
    assert learnt.words_for_tokens(1) == 1
    # A server with nonsensical counts is not trusted.
    assert Calibration.from_probes(50, 50) == Calibration()


def test_prompts_are_words() -> None:
    assert len(make_prompt(40, seed=3).split()) == 40
    assert make_prompt(40, seed=3) == make_prompt(40, seed=3)
