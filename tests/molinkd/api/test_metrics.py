"""Delay of a loop, sampled only while needed."""

import asyncio
import time
from typing import Any

from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families

import molink
from molinkd.api.metrics import SAMPLE_INTERVAL_S, Histogram, LoopDelaySampler


async def test_a_blocked_loop_is_late() -> None:
    found: asyncio.Queue[float] = asyncio.Queue()
    delay = LoopDelaySampler(found.put_nowait, lambda: found.qsize() < 2)
    delay.start_sampling()
    delay.start_sampling()
    time.sleep(SAMPLE_INTERVAL_S + 0.05)  # noqa: ASYNC251 - the delay that it measures
    assert await found.get() >= 0.05
    assert await found.get() >= 0


async def test_sampling_stops_when_unneeded_and_restarts() -> None:
    found: asyncio.Queue[float] = asyncio.Queue()
    delay = LoopDelaySampler(found.put_nowait, lambda: False)
    for _ in range(2):
        delay.start_sampling()
        await found.get()
        await asyncio.sleep(3 * SAMPLE_INTERVAL_S)
        assert found.empty()


async def test_health_and_readiness(client: TestClient, backend: Any) -> None:
    assert (await client.get("/health")).status == 200
    assert (await client.get("/readyz")).status == 200
    backend.ready_now = False
    assert (await client.get("/health")).status == 200
    response = await client.get("/readyz")
    assert response.status == 503
    assert (await response.json())["error"]["code"] == "unavailable"


async def test_metrics(client: TestClient, backend: Any) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5}
    await client.post("/v1/completions", json=body)
    await client.post("/v1/completions", json={**body, "model": "no"})
    await client.get("/nowhere")
    response = await client.get("/metrics")
    assert response.content_type == "text/plain"
    families = {
        family.name: family for family in text_string_to_metric_families(await response.text())
    }
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    requests = "molink_endpoint_requests_total"
    assert samples[requests, "/v1/completions", "200"] == 1
    assert samples[requests, "/v1/completions", "404"] == 1
    assert samples[requests, "other", "404"] == 1
    assert samples["molink_endpoint_generated_tokens_total",] == 5
    assert samples["molink_endpoint_time_to_first_token_seconds_count",] == 1
    assert samples["molink_endpoint_inter_token_seconds_count",] == 4
    assert samples["molink_endpoint_answer_seconds_count",] == 1
    assert ("molink_endpoint_loop_delay_seconds_count",) in samples
    assert samples["molink_endpoint_running",] == 0
    assert samples["molink_recoveries_total",] == 3
    assert samples["molink_link_sent_bytes_total", "1-0", "p1", "3:6"] == 5
    assert samples["molink_link_received_bytes_total", "0-1", "p1", "3:6"] == 6
    assert samples["molink_scheduler_blocks_free", "p1", "0:3"] == 7
    assert samples["molink_scheduler_blocks_free", "p1", "3:6"] == 8
    (requests_here,) = families["molink_stage_requests"].samples
    assert requests_here.labels == {"pipeline": "p1", "stage": "3:6"}
    assert requests_here.value == 2
    assert samples["molink_odd_name",] == 1
    (build,) = families["molink_build_info"].samples
    assert (build.value, build.labels["version"]) == (1, molink.__version__)
    assert families["molink_stage_requests"].documentation == "Requests known to the stage."
    for family in families.values():
        assert family.documentation.endswith(".")
        assert " " in family.documentation
        total = [sample.name.endswith("_total") for sample in family.samples]
        assert all(total) if family.type == "counter" else not any(total)


def test_histogram() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(seconds)
    values = {
        sample.labels.get("le", sample.name): sample.value
        for sample in histogram.to_metric("x", "y").samples
    }
    assert values == {"0.1": 2, "1.0": 3, "+Inf": 4, "x_count": 4, "x_sum": 3.65}
