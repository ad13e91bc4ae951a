"""The orders that a stage's part of the ring carries out."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.rope import RopeConfig
from molink.facts.drafts import AUTO_DRAFTS, MAX_LOOKAHEAD
from molink.facts.profile import UNKNOWN_PROFILE
from molink.facts.ring_times import LinkFacts
from molink.facts.settings import PipelineSettings
from molink.link.estimate.link_memory import LinkMemory
from molink.link.recording import replay_recording
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.scheduler.policies import create
from molink.scheduler.policies.answer_lengths import MIN_ANSWERS, AnswerLengths
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import (
    Channel,
    Frame,
    LinkHello,
    SampledId,
    SamplerOutput,
    SamplingParams,
    Tombstone,
)
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import StageLoad
from molink.wire.messages.worker_pipe import FormRing, LoadStage
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender
from molinkd.worker.engine import StageEngine
from molinkd.worker.executor import StageExecutor
from molinkd.worker.stage_runtime import StageRuntime
from tests.support.micro_batches import run_micro_batches
from tests.support.request_states import make_state

KEYS = KeyPair.generate()
PROMPT = tuple(range(9))


def config(rope: RopeConfig, recurrent_layers: frozenset[int] = frozenset()) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=10,
        hidden_size=8,
        layers=1,
        intermediate_size=8,
        norm_eps=1e-6,
        max_model_len=64,
        dtype="f32",
        eos_ids=(),
        heads=1,
        kv_heads=1,
        head_dim=8,
        attention_scale=1.0,
        windows=(0,),
        rope=rope,
        recurrent_layers=recurrent_layers,
    )


def place(
    rope: RopeConfig,
    stages: int = 1,
    context: Any = None,
    memory: LinkMemory | None = None,
    host: HostMemory = NO_HOST_MEMORY,
    answers: AnswerLengths | None = None,
    recurrent_layers: frozenset[int] = frozenset(),
    **settings: Any,
) -> StageRuntime:
    """The runtime of stage 0, which is the whole ring unless ``stages`` says otherwise."""
    start = LoadStage(
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
        max_model_len=64,
        settings=PipelineSettings(**settings),
    )
    me = StageAddress(peer="me", public_key=KEYS.public, addresses=("127.0.0.1",), port=1)
    command = FormRing(epoch=1, ring=(me,) * stages, blocks=16, micro_batches=1)
    stage: Any = SimpleNamespace(
        is_first=True,
        is_last=stages == 1,
        config=config(rope, recurrent_layers),
        dtype="f32",
        wire_dtype="f32",
        weight_bytes=1000,
        host_expert_bytes=0,
        resident_share=0.0,
        block_bytes=lambda size: 10 * size,
        pool_bytes=lambda blocks, size: 10 * blocks * size,
    )
    server: Any = SimpleNamespace(send=lambda *_: True)
    engine = StageEngine(stage, UNKNOWN_PROFILE, partial(StageExecutor, stage))
    return StageRuntime(
        start, command, engine, context, server, print, print, memory, host, answers
    )


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
        scheduler = own._ring_seat.scheduler
        assert scheduler is not None
        found = []
        for key in ("first", "second"):
            scheduler.submit_request(
                make_state("d", key, PROMPT, len(PROMPT), 1, SamplingParams()), 0.0
            )
            batch = scheduler.next_batch(0.0)
            assert batch is not None
            seq = batch.volumes[0].header.seq
            rows = batch.volumes[0].header.slices[0]
            (emission,) = scheduler.on_sampled(
                SamplerOutput(seq, (SampledId(rows.request, 9, 1),)), {}, 0.0
            )
            found.append(getattr(emission.message, "cached_tokens", None))
        assert found == [0, cached]
    finally:
        await own.close()


async def test_the_scheduler_knows_the_longrope_boundary() -> None:
    lists = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
    for given, bound in ((lists, 32), (dict.fromkeys(lists, (2.0,) * 4), 0)):
        own = place(RopeConfig(kind="longrope", factor=2.0, original_context=32, **given))
        try:
            assert own._ring_seat.scheduler is not None
            assert own._ring_seat.scheduler.config.short_context == bound
        finally:
            await own.close()


async def test_states_turn_off_what_they_can_not_do() -> None:
    settings: Any = {"preemption_mode": "proactive-swap", "num_speculative_tokens": AUTO_DRAFTS}
    for recurrent in (frozenset[int](), frozenset({0})):
        own = place(RopeConfig(), recurrent_layers=recurrent, **settings)
        try:
            assert own._ring_seat.scheduler is not None
            made = own._ring_seat.scheduler.config
            kept = made.prefix_cache, made.num_speculative_tokens, made.preemption_mode
            counts = made.state_slots, made.max_num_seqs, made.lookahead_volumes
            if recurrent:
                assert (kept, counts) == ((True, AUTO_DRAFTS, "recompute"), (4, 4, 0))
            else:
                assert kept == (True, AUTO_DRAFTS, "proactive-swap")
                assert counts == (0, 64, MAX_LOOKAHEAD)
        finally:
            await own.close()


@pytest.mark.parametrize(("mode", "blocks"), [("proactive-swap", 5), ("recompute", 0)])
async def test_the_scheduler_knows_of_host_memory_if_enabled(mode: str, blocks: int) -> None:
    own = place(RopeConfig(), host=HostMemory(5, 0.001), preemption_mode=mode)
    try:
        own.open()
        _, gauges = own.collect_stats()
        assert gauges["scheduler_host_blocks"] == blocks
        assert gauges["stage_host_kv_bytes"] == 5 * 10 * 4
        scheduler = own.report_scheduler_load()
        assert scheduler is not None
        assert (scheduler.swapped, scheduler.host_blocks, scheduler.used_host_blocks) == (
            0,
            blocks,
            0,
        )
    finally:
        await own.close()


async def test_load_reports() -> None:
    own = place(RopeConfig())
    try:
        assert own.report_load() == StageLoad("p1", 0, weight_bytes=1000, kv_bytes=16 * 10 * 4)
        assert own.collect_stats()[1]["stage_kv_bytes"] == 640
        scheduler = own.report_scheduler_load()
        assert scheduler is not None
        assert (scheduler.pipeline, scheduler.blocks, scheduler.requests) == ("p1", 16, ())
    finally:
        await own.close()


async def test_a_token_that_does_not_exist_fails_its_own_request_only() -> None:
    own = place(RopeConfig())
    try:
        ring, scheduler = own.ring, own._ring_seat.scheduler
        assert scheduler is not None
        for key in ("bad", "good"):
            scheduler.submit_request(
                make_state("d", key, PROMPT, len(PROMPT), 4, SamplingParams()), 0.0
            )
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        header = batch.volumes[0].header
        bad, good = (rows.request for rows in header.slices)
        ring.on_message(
            SamplerOutput(header.seq, (SampledId(bad, 9, 10), SampledId(good, 9, 9))), None
        )
        assert scheduler.live_requests == [("d", "good")]
        assert scheduler.collect_stats()[0]["scheduler_failed_total"] == 1
        assert ring.num_strays == 1
    finally:
        await own.close()


async def test_the_scheduling_policy_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    class Listening(Fcfs):
        def on_arrived(self, job: RequestState, now: float) -> None:
            heard.append(job.key)

    monkeypatch.setitem(create._POLICIES, "listening", Listening)
    own = place(RopeConfig(), scheduling_policy="listening")
    try:
        assert own._ring_seat.scheduler is not None
        own._ring_seat.scheduler.submit_request(
            make_state("d", "a", PROMPT, len(PROMPT), 1, SamplingParams()), 0.0
        )
        assert heard == ["a"]
    finally:
        await own.close()


async def test_answer_lengths_outlive_an_epoch() -> None:
    answers = AnswerLengths()
    own = place(RopeConfig(), answers=answers, scheduling_policy="gittins")
    try:
        scheduler = own._ring_seat.scheduler
        assert scheduler is not None
        for key in map(str, range(MIN_ANSWERS)):
            scheduler.submit_request(
                make_state("d", key, PROMPT, len(PROMPT), 2, SamplingParams()), 0.0
            )
        while scheduler.live_requests:
            run_micro_batches(scheduler, scheduler.next_batch(0.0), 0.0)
    finally:
        await own.close()
    assert answers.longer_answers(0, len(PROMPT)) == [2] * MIN_ANSWERS


async def test_a_link_is_recorded_if_a_folder_is_given(net: Any, tmp_path: Path) -> None:
    for record in ("", str(tmp_path / "records")):
        own = place(RopeConfig(), 2, net.context, record=record)
        own.open()
        own.ring.run_pending()
        await own.close()
    recordings = contents(tmp_path)
    assert list(recordings) == ["link-p1-0-1.jsonl"]
    assert replay_recording(recordings["link-p1-0-1.jsonl"]) == []


def contents(folder: Path) -> dict[str, list[bytes]]:
    """Lines of each file."""
    return {path.name: path.read_bytes().splitlines() for path in folder.rglob("*.*")}


async def test_link_measurements_are_reported_and_stored(net: Any) -> None:
    memory = LinkMemory(None)
    memory.remember_link("me", LinkFacts(0.02, 1e6), 0.0)
    own = place(RopeConfig(), 2, net.context, memory=memory)
    own.open()
    try:
        _, gauges = own.collect_stats()
        assert gauges["link_latency_seconds"] == 0.02
        assert gauges["link_rate_bytes_per_second"] == 1e6
        own._store_link_facts(LinkFacts(0.03, 12.5e6))
        own.ring.on_link_measured(LinkFacts(0.03, 12.5e6), 0.0)
        assert memory.find_facts("me") == LinkFacts(0.03, 12.5e6)
        assert own.ring.links == (LinkFacts(0.03, 12.5e6), LinkFacts())
    finally:
        await own.close()


async def test_what_arrives_on_the_link_is_counted(net: Any) -> None:
    own = place(RopeConfig(), 2, net.context)
    try:
        sender = MessageSender(identity=b"someone", peer_id="someone")
        own.handle_message(sender, LinkHello("p1", 1, 0, Channel.DECODE), None)
        own.handle_message(sender, Frame(1, Channel.DECODE, 0, Tombstone(1)), None)
        counters, _ = own.collect_stats()
        assert counters["link_received_strangers_total"] == 1
        assert counters["link_received_unbound_total"] == 1
        kinds = ("bytes", "duplicates", "frames", "gaps", "garbage", "old_epochs")
        assert all(counters[f"link_received_{kind}_total"] == 0 for kind in kinds)
    finally:
        await own.close()
