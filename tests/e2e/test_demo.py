"""``molink demo``: three daemons as real processes on one PC."""

import json
import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pydantic
import pytest

from molinkd.api.metric_help import HELP, UNDESCRIBED
from molinkd.peer.home import Home
from tests.support.processes import START_S, Process, Tools

QUESTION = [{"role": "user", "content": "What is molink?"}]
LONG = {"temperature": 0, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
#: Never generated to its end.
ENDLESS = {**LONG, "max_tokens": 2000}


#: Long enough that most of the answer is missing when a worker is killed.
HELD = "([a-z]{4} ){100}"


def text_of(client: openai.OpenAI, **options: Any) -> str:
    stream = client.chat.completions.create(
        model="molink-demo", messages=QUESTION, stream=True, **options
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_three_peers_hold_disjoint_layers_that_cover_the_model(
    demo: Process, tools: type[Tools]
) -> None:
    done = tools.run_molink(demo.home.root, "status", "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    peers = status["peers"]
    assert len(peers) == 3
    ranges = sorted(tuple(worker["layers"]) for peer in peers for worker in peer["workers"])
    assert ranges[0][0] == 0
    assert [last for _, last in ranges[:-1]] == [first for first, _ in ranges[1:]]
    pids = [peer["daemon_pid"] for peer in peers]
    pids += [worker["pid"] for peer in peers for worker in peer["workers"]]
    assert len(set(pids)) == 6
    assert all(psutil.pid_exists(pid) for pid in pids)
    (pipeline,) = status["pipelines"]
    assert pipeline["ready"]
    assert sorted(tuple(stage["layers"]) for stage in pipeline["stages"]) == ranges
    endpoints = {peer["endpoint"] for peer in peers}
    assert len(endpoints) == 3
    for endpoint in endpoints:  # what their chat pages draw
        with urllib.request.urlopen(f"{endpoint}/swarm", timeout=60) as answer:
            shown = json.load(answer)
        stages = shown["rings"][0]["stages"]
        assert sorted(tuple(stage["layers"]) for stage in stages) == ranges
        assert all(stage["doing"] == "" and stage["decode_s"] > 0 for stage in stages)


def test_the_status_for_people(demo: Process, tools: type[Tools]) -> None:
    done = tools.run_molink(demo.home.root, "status")
    assert done.returncode == 0, done.stderr
    for text in ("demo-1", "demo-2", "demo-3", "molink-demo", "ready"):
        assert text in done.stdout


def test_top_without_a_terminal(demo: Process, tools: type[Tools]) -> None:
    """On the coordinator's PC and on another one, it shows the whole swarm."""
    elsewhere = demo.home.root / "demo" / "peer-2"
    client = tools.client(demo.found().endpoints[0])
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with client.chat.completions.create(
                model="molink-demo", messages=QUESTION, stream=True, **LONG
            ) as stream:
                for _ in stream:
                    if over.is_set():
                        break

    def at_work() -> bool:
        done = tools.run_molink(elsewhere, "top", "--json")
        (ring,) = json.loads(done.stdout)["rings"]
        return bool(ring["requests"]) and all(
            stage["weights"] and stage["kv"] for stage in ring["stages"]
        )

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        tools.wait_for(at_work, demo)
    finally:
        over.set()
        asking.join()
    done = tools.run_molink(demo.home.root, "top")
    assert done.returncode == 0, done.stderr
    for text in ("demo-1", "demo-2", "demo-3", "READY", "> link to", "EVENTS", "is ready"):
        assert text in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "\x1b" not in done.stdout


def described_metrics(endpoint: str) -> dict[str, str]:
    """Descriptions of an endpoint's metrics by name."""
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=START_S) as answer:
        lines = answer.read().decode("utf-8").splitlines()
    marked = [line.removeprefix("# HELP molink_") for line in lines if line.startswith("# HELP ")]
    pairs = (line.partition(" ")[::2] for line in marked)
    return {name.removesuffix("_total"): text for name, text in pairs}


def test_every_figure_is_described(demo: Process, tools: type[Tools]) -> None:
    """Each metric has a description; each description has a metric, except those of rare events."""
    text_of(tools.client(demo.found().endpoints[1]), max_tokens=3)
    helps: dict[str, str] = {}
    # Queue metrics belong to a policy that isn't the default.
    seldom = {name for name in HELP if name.startswith(("daemon_requests_", "scheduler_queue_"))}

    def has_all() -> bool:  # workers report theirs a little later
        for endpoint in demo.found().endpoints:
            helps.update(described_metrics(endpoint))
        return HELP.keys() - seldom <= helps.keys()

    tools.wait_for(has_all, demo)
    assert [name for name, text in helps.items() if text == UNDESCRIBED] == []
    own = {name for name in helps if name.startswith("endpoint_") or name == "build_info"}
    assert helps.keys() - own - seldom == HELP.keys() - seldom


def test_the_official_client_streams_from_each_endpoint(demo: Process, tools: type[Tools]) -> None:
    endpoints = demo.found().endpoints
    assert len(endpoints) == 3
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda e: text_of(tools.client(e), temperature=0), endpoints))
    assert texts[0]
    assert len(set(texts)) == 1


@pytest.mark.slow
def test_ask_with_smaller_weights(tools: type[Tools], tmp_path: Path) -> None:
    """As they are, on three peers, those of the wheel are asked."""
    smaller = ("demo", "--quantize", "int8", "--peers", "2")
    done = tools.run_molink(tmp_path, *smaller, "--ask", "What is molink?")
    assert done.returncode == 0, done.stderr
    assert "molink" in done.stdout
    assert "http" not in done.stdout
    assert "Starting" in done.stderr
    # The measurements of its two stages stay for the next demo.
    kept = Home(tmp_path).demo_home(1)
    assert kept.device.exists()
    assert kept.kernel_checks.exists()
    assert len(list(kept.profiles.glob("*.json"))) == 2
    # The peers' copies of the model do not.
    assert len(kept.demo_peers()) == 2
    assert not any(peer.models.exists() for peer in kept.demo_peers())


def test_chat_finds_the_demo(demo: Process, tools: type[Tools]) -> None:
    done = tools.run_molink(demo.home.root, "chat", "Hello!")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_closing_the_connection_frees_the_blocks(demo: Process, tools: type[Tools]) -> None:
    status = demo.wait_ready()
    head = status["pipelines"][0]["stages"][0]["peer"]
    (at_head,) = [peer["endpoint"] for peer in status["peers"] if peer["id"] == head]
    elsewhere = next(e for e in demo.found().endpoints if e != at_head)
    stream = tools.client(elsewhere).chat.completions.create(
        model="molink-demo", messages=QUESTION, stream=True, **ENDLESS
    )
    for _ in range(5):
        next(stream)
    tools.wait_for(lambda: tools.metrics(at_head)["molink_scheduler_blocks_used"] > 0, demo)
    stream.close()
    tools.wait_for(lambda: tools.metrics(at_head)["molink_scheduler_blocks_used"] == 0, demo)
    assert tools.metrics(at_head)["molink_scheduler_cancelled_total"] >= 1


def test_a_repeated_prompt_is_found_in_the_prefix_cache(demo: Process, tools: type[Tools]) -> None:
    status = demo.wait_ready()
    head = status["pipelines"][0]["stages"][0]["peer"]
    (at_head,) = [peer["endpoint"] for peer in status["peers"] if peer["id"] == head]
    elsewhere = next(e for e in demo.found().endpoints if e != at_head)
    client = tools.client(elsewhere)
    asked = {
        "model": "molink-demo",
        "messages": [{"role": "user", "content": "What is molink, and what is it for? " * 24}],
        "max_tokens": 4,
        "temperature": 0,
    }
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    *_, last = stream
    assert first.usage.prompt_tokens > 200
    assert first.usage.prompt_tokens_details.cached_tokens < 200
    # All but the last token, which must be computed.
    for usage in (again.usage, last.usage):
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content
    hits, minimum = "molink_scheduler_prefix_hit_tokens_total", 2 * (first.usage.prompt_tokens - 1)
    tools.wait_for(lambda: tools.metrics(at_head)[hits] >= minimum, demo)
    assert 0 < tools.metrics(at_head)["molink_scheduler_prefix_hit_rate"] < 1


def test_long_answers_of_one_pc_leave_a_slot_to_another(demo: Process, tools: type[Tools]) -> None:
    """More than there are slots, half of which nobody reads.

    Without processes: ``tests/scheduler/test_slots.py``.
    """
    status = demo.wait_ready()
    head = status["pipelines"][0]["stages"][0]["peer"]
    (at_head,) = [peer["endpoint"] for peer in status["peers"] if peer["id"] == head]
    modest, greedy = [e for e in demo.found().endpoints if e != at_head]
    over, ended = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        with tools.client(greedy).completions.create(
            model="molink-demo",
            prompt=f"{number} once upon a time",
            stream=True,
            max_tokens=2000,
            extra_body={"ignore_eos": True},
        ) as stream:
            if number % 2:
                over.wait()
            for _ in stream:
                if over.is_set():
                    return
        ended.set()

    def preemptions() -> float:
        return tools.metrics(at_head)["molink_scheduler_preemptions_total"]

    before = preemptions()
    with ThreadPoolExecutor(66) as pool:
        held = [pool.submit(hold, number) for number in range(66)]
        try:
            tools.wait_for(lambda: tools.metrics(at_head)["molink_scheduler_running"] == 64, demo)
            for _ in range(2):
                answer = tools.client(modest).completions.create(
                    model="molink-demo", prompt="What is molink?", max_tokens=1
                )
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 1
            assert not ended.is_set(), "it waited until an answer had ended"
        finally:
            over.set()
    for each in held:
        each.result()
    tools.wait_for(lambda: preemptions() > before, demo)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stream_outlives_a_worker(demo: Process, tools: type[Tools], stage: int) -> None:
    """Stage 0's worker is the head, too. The client sees a pause, and the same text.

    So does one whose answer is held to a form.
    """
    client = tools.client(demo.found().endpoints[1])
    expected = text_of(client, **LONG)
    status = demo.wait_ready()
    before = status["pipelines"][0]["epoch"]
    (pid,) = [
        worker["pid"]
        for peer in status["peers"]
        for worker in peer["workers"]
        if worker["stage"] == stage
    ]
    got: list[str] = []
    killed = threading.Event()
    held = client.chat.completions.create(
        model="molink-demo",
        messages=QUESTION,
        stream=True,
        temperature=1.5,
        seed=1,
        max_tokens=600,
        extra_body={"guided_regex": HELD},
    )
    stream = client.chat.completions.create(
        model="molink-demo", messages=QUESTION, stream=True, **LONG
    )
    for chunk in stream:
        if chunk.choices:
            got.append(chunk.choices[0].delta.content or "")
        if len(got) == 20 and not killed.is_set():
            psutil.Process(pid).kill()
            killed.set()
    assert killed.is_set()
    assert "".join(got) == expected
    assert re.fullmatch(HELD, "".join(chunk.choices[0].delta.content or "" for chunk in held))
    tools.wait_for(lambda: demo.wait_ready()["pipelines"][0]["epoch"] > before, demo)
    tools.wait_for(lambda: text_of(client, temperature=0, max_tokens=5), demo)


def test_the_coordinator_is_not_in_the_way_of_a_token(demo: Process, tools: type[Tools]) -> None:
    client = tools.client(demo.found().endpoints[2])
    expected = text_of(client, **LONG)
    status = demo.wait_ready()
    pid, epoch = status["coordinator"]["pid"], status["pipelines"][0]["epoch"]
    stream = client.chat.completions.create(
        model="molink-demo", messages=QUESTION, stream=True, **LONG
    )
    got = []
    for chunk in stream:
        if chunk.choices:
            got.append(chunk.choices[0].delta.content or "")
        if len(got) == 10:
            psutil.Process(pid).kill()
    assert "".join(got) == expected

    def back() -> bool:
        return demo.status()["coordinator"].get("pid", pid) != pid

    tools.wait_for(back, demo)
    # It finds the running pipeline again, rather than starting another one.
    assert demo.wait_ready()["pipelines"][0]["epoch"] == epoch


def test_an_answer_held_to_a_schema(demo: Process, tools: type[Tools]) -> None:
    """The grammar goes over two links, to the last stage of three; from any PC."""

    class Sum(pydantic.BaseModel):
        text: str = pydantic.Field(max_length=20)
        total: int = pydantic.Field(ge=0, le=99)

    for url in demo.found().endpoints[:2]:
        answer = tools.client(url).chat.completions.parse(
            model="molink-demo",
            messages=QUESTION,
            response_format=Sum,
            temperature=1.5,
            seed=1,
            max_tokens=100,
        )
        assert isinstance(answer.choices[0].message.parsed, Sum)
        assert answer.choices[0].finish_reason == "stop"
