"""What a stage's place in the ring makes of its orders."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.rope import RopeConfig
from molink.facts.profile import UNKNOWN
from molink.facts.ringtimes import LinkFacts
from molink.facts.settings import PipelineSettings
from molink.link.estimate.remembered import LinkMemory
from molink.link.recording import replay
from molink.ring.hosted import NO_ROOM, HostRoom
from molink.scheduler.job import Job
from molink.scheduler.policies import create
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.policies.lengths import LEAST, AnswerLengths
from molink.scheduler.request import HeadRequest
from molink.wire.messages.data import Choice, Frame, Lane, LinkHello, Sampled, Sampling, Tombstone
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import StageLoad
from molink.wire.messages.pipe import FormRing, Start
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.server import Sender
from molinkd.worker.engine import Engine
from molinkd.worker.executor import Executor
from molinkd.worker.place import Place
from tests.support.go_round import go_round

KEYS = KeyPair.generate()
PROMPT = tuple(range(9))


def config(rope: RopeConfig) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=10,
        hidden_size=8,
        layers=1,
        intermediate_size=8,
        norm_eps=1e-6,
        context=64,
        dtype="f32",
        eos_ids=(),
        heads=1,
        kv_heads=1,
        head_dim=8,
        attention_scale=1.0,
        windows=(0,),
        rope=rope,
    )


def place(
    rope: RopeConfig,
    stages: int = 1,
    context: Any = None,
    memory: LinkMemory | None = None,
    host: HostRoom = NO_ROOM,
    answers: AnswerLengths | None = None,
    **settings: Any,
) -> Place:
    """That of stage 0, which is the whole ring unless there are more."""
    start = Start(
        pipeline="p1",
        stage=0,
        stages=stages,
        layers=(0, 1),
        model_dir="nowhere",
        dtype="f32",
        device="cpu",
        threads=1,
        public_key=KEYS.public,
        secret_key=KEYS.secret,
        bind="127.0.0.1",
        ports=(20000, 65000),
        kv_bytes=1 << 20,
        block_size=4,
        max_context=64,
        settings=PipelineSettings(**settings),
    )
    me = StageAddress(peer="me", public_key=KEYS.public, addresses=("127.0.0.1",), port=1)
    order = FormRing(epoch=1, ring=(me,) * stages, blocks=16, micro_batches=1)
    stage: Any = SimpleNamespace(
        is_first=True,
        is_last=stages == 1,
        config=config(rope),
        travel_dtype="f32",
        weight_bytes=1000,
        block_bytes=lambda size: 10 * size,
    )
    server: Any = SimpleNamespace(send=lambda *_: True)
    engine = Engine(stage, UNKNOWN, partial(Executor, stage))
    return Place(start, order, engine, context, server, print, print, memory, host, answers)


@pytest.mark.parametrize(
    ("rope", "cached"),
    [
        (RopeConfig(), 8),
        (RopeConfig(kind="longrope", factor=2.0, original_context=32), 8),
        (RopeConfig(kind="dynamic", factor=2.0, original_context=32), 0),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
async def test_only_keys_that_do_not_depend_on_their_request_are_shared(
    rope: RopeConfig, cached: int
) -> None:
    own = place(rope)
    try:
        head = own._seat.head
        assert head is not None
        found = []
        for key in ("first", "second"):
            head.submit(HeadRequest("d", key, PROMPT, len(PROMPT), 1, Sampling()), 0.0)
            batch = head.next(0.0)
            assert batch is not None
            tick = batch.volumes[0].header.tick
            rows = batch.volumes[0].header.rows[0]
            (emission,) = head.sampled(Sampled(tick, (Choice(rows.request, 9, 1),)), {}, 0.0)
            found.append(getattr(emission.message, "cached", None))
        assert found == [0, cached]
    finally:
        await own.close()


async def test_a_head_knows_from_where_on_keys_are_others() -> None:
    lists = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
    for given, bound in ((lists, 32), (dict.fromkeys(lists, (2.0,) * 4), 0)):
        own = place(RopeConfig(kind="longrope", factor=2.0, original_context=32, **given))
        try:
            assert own._seat.head is not None
            assert own._seat.head.limits.short_context == bound
        finally:
            await own.close()


@pytest.mark.parametrize(("mode", "blocks"), [("proactive-swap", 5), ("recompute", 0)])
async def test_a_head_knows_of_host_memory_where_it_is_to_be_used(mode: str, blocks: int) -> None:
    own = place(RopeConfig(), host=HostRoom(5, 0.001), preemption_mode=mode)
    try:
        own.open()
        _, gauges = own.stats()
        assert gauges["head_host_blocks"] == blocks
        assert gauges["stage_host_kv_bytes"] == 5 * 10 * 4
        head = own.head_load()
        assert head is not None
        assert (head.swapped, head.host_blocks, head.host_used) == (0, blocks, 0)
    finally:
        await own.close()


async def test_what_others_are_told() -> None:
    own = place(RopeConfig())
    try:
        assert own.load() == StageLoad("p1", 0, weights=1000, kv=16 * 10 * 4)
        assert own.stats()[1]["stage_kv_bytes"] == 640
        head = own.head_load()
        assert head is not None
        assert (head.pipeline, head.blocks, head.requests) == ("p1", 16, ())
    finally:
        await own.close()


async def test_a_token_that_does_not_exist_fails_its_own_request_only() -> None:
    own = place(RopeConfig())
    try:
        ring, head = own.ring, own._seat.head
        assert head is not None
        for key in ("bad", "good"):
            head.submit(HeadRequest("d", key, PROMPT, len(PROMPT), 4, Sampling()), 0.0)
        batch = head.next(0.0)
        assert batch is not None
        header = batch.volumes[0].header
        bad, good = (rows.request for rows in header.rows)
        ring.arrive(Sampled(header.tick, (Choice(bad, 9, 10), Choice(good, 9, 9))), None)
        assert head.live == [("d", "good")]
        assert head.stats()[0]["head_failed_total"] == 1
        assert ring.strays == 1
    finally:
        await own.close()


async def test_the_heads_policy_is_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    class Listening(Fcfs):
        def arrived(self, job: Job, now: float) -> None:
            heard.append(job.request.key)

    monkeypatch.setitem(create._POLICIES, "listening", Listening)
    own = place(RopeConfig(), scheduling_policy="listening")
    try:
        assert own._seat.head is not None
        own._seat.head.submit(HeadRequest("d", "a", PROMPT, len(PROMPT), 1, Sampling()), 0.0)
        assert heard == ["a"]
    finally:
        await own.close()


async def test_the_next_head_knows_how_long_answers_were() -> None:
    answers = AnswerLengths()
    own = place(RopeConfig(), answers=answers, scheduling_policy="gittins")
    try:
        head = own._seat.head
        assert head is not None
        for key in map(str, range(LEAST)):
            head.submit(HeadRequest("d", key, PROMPT, len(PROMPT), 2, Sampling()), 0.0)
        while head.live:
            go_round(head, head.next(0.0), 0.0)
    finally:
        await own.close()
    assert answers.beyond(0, len(PROMPT)) == [2] * LEAST


async def test_a_link_is_recorded_if_a_folder_is_given(net: Any, tmp_path: Path) -> None:
    for record in ("", str(tmp_path / "records")):
        own = place(RopeConfig(), 2, net.context, record=record)
        own.open()
        own.ring.pump()
        await own.close()
    recordings = contents(tmp_path)
    assert list(recordings) == ["link-p1-0-1.jsonl"]
    assert replay(recordings["link-p1-0-1.jsonl"]) == []


def contents(folder: Path) -> dict[str, list[bytes]]:
    """Lines of each file."""
    return {path.name: path.read_bytes().splitlines() for path in folder.rglob("*.*")}


async def test_what_is_measured_of_the_link_is_told_and_remembered(net: Any) -> None:
    memory = LinkMemory(None)
    memory.keep("me", LinkFacts(0.02, 1e6), 0.0)
    own = place(RopeConfig(), 2, net.context, memory=memory)
    own.open()
    try:
        _, gauges = own.stats()
        assert gauges["link_latency_seconds"] == 0.02
        assert gauges["link_rate_bytes_per_second"] == 1e6
        own._remember(LinkFacts(0.03, 12.5e6))
        own.ring.link_measured(LinkFacts(0.03, 12.5e6), 0.0)
        assert memory.find("me") == LinkFacts(0.03, 12.5e6)
        assert own.ring.links == (LinkFacts(0.03, 12.5e6), LinkFacts())
    finally:
        await own.close()


async def test_what_arrives_on_the_link_is_counted(net: Any) -> None:
    own = place(RopeConfig(), 2, net.context)
    try:
        sender = Sender(identity=b"someone", user_id="someone")
        own.handle(sender, LinkHello("p1", 1, 0, Lane.DECODE), None)
        own.handle(sender, Frame(1, Lane.DECODE, 0, Tombstone(1)), None)
        counters, _ = own.stats()
        assert counters["link_received_strangers_total"] == 1
        assert counters["link_received_unbound_total"] == 1
        kinds = ("bytes", "duplicates", "frames", "gaps", "garbage", "old_epochs")
        assert all(counters[f"link_received_{kind}_total"] == 0 for kind in kinds)
    finally:
        await own.close()
