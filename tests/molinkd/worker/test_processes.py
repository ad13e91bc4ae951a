"""Real worker processes in a ring, driven over their pipes and sockets as a daemon would."""

import asyncio
import itertools
import queue
import subprocess
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq.asyncio

from molink.facts.identity import derive_peer_id
from molink.facts.settings import PipelineSettings
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.serving import (
    Cancel,
    OutputTokens,
    PromptFragment,
    Rejected,
    Request,
    Submit,
)
from molink.wire.messages.worker_pipe import (
    DraftModelSpec,
    FormRing,
    FromWorker,
    LoadStage,
    PeerKey,
    PeerKeys,
    RingFormed,
    WarmedUp,
    WarmUp,
    WorkerLoaded,
    WorkerStats,
    read_pipe,
    write_pipe,
)
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.key_pair import KeyPair

PROMPT = [257, 72, 101, 108, 108, 111, 258, 10, 44, 99]
TOKENS = 24


@dataclass
class Stage:
    """One worker process and the pipe to it."""

    process: subprocess.Popen[bytes]
    keys: KeyPair
    port: int = 0

    def __post_init__(self) -> None:
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._read_pipe, daemon=True).start()

    def _read_pipe(self) -> None:
        """Read all messages: a pipe of Windows has room for 4 KB, and a worker waits for more."""
        decoder = msgspec.msgpack.Decoder(FromWorker)
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            while (message := read_pipe(stream, decoder)) is not None:
                self._messages.put(message)
        self._messages.put(None)

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        write_pipe(self.process.stdin, message)

    def hear(self, kind: type[Any]) -> Any:
        """The next message of ``kind``."""
        while True:
            message = self._messages.get()
            assert message is not None, "the worker has ended"
            if isinstance(message, kind):
                return message

    def address(self) -> StageAddress:
        return StageAddress(
            peer=derive_peer_id(self.keys.public),
            public_key=self.keys.public,
            addresses=("127.0.0.1",),
            port=self.port,
        )


@contextmanager
def ring_of(
    folder: Path, cuts: list[int], client: KeyPair, draft: Path | None = None
) -> Iterator[list[Stage]]:
    """Worker processes for layers ``cuts[i]:cuts[i + 1]``, loaded and formed under epoch 1."""
    stages = []
    ranges = list(itertools.pairwise(cuts))
    try:
        for index, layers in enumerate(ranges):
            process = subprocess.Popen(
                [sys.executable, "-m", "molinkd.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stage = Stage(process, KeyPair.generate())
            stages.append(stage)
            start = _start(folder, index, len(ranges), layers, stage.keys)
            if draft is not None and index == 0:
                beside = DraftModelSpec(model_dir=str(draft), kv_bytes=1 << 20)
                settings = PipelineSettings(max_num_batched_tokens=16, num_speculative_tokens=3)
                start = msgspec.structs.replace(start, draft=beside, settings=settings)
            stage.tell(start)
        keys = [client, *(stage.keys for stage in stages)]
        members = tuple(
            PeerKey(peer=derive_peer_id(key.public), public_key=key.public) for key in keys
        )
        blocks = []
        for stage in stages:
            stage.tell(PeerKeys(peers=members))
            loaded = stage.hear(WorkerLoaded)
            assert loaded.profile.is_known
            stage.port = loaded.port
            blocks.append(loaded.max_blocks)
        form(stages, 1, min(blocks))
        yield stages
    finally:
        for stage in stages:
            end(stage)


def end(stage: Stage) -> None:
    stage.process.kill()
    stage.process.wait()
    assert stage.process.stdin is not None
    stage.process.stdin.close()


async def ends_with_its_pipe(stage: Stage) -> None:
    """Close a worker's pipe: nothing else ends it."""
    assert stage.process.stdin is not None
    stage.process.stdin.close()
    assert await asyncio.to_thread(stage.process.wait, 30) == 0


def form(stages: list[Stage], epoch: int, blocks: int) -> None:
    ring = tuple(stage.address() for stage in stages)
    for stage in stages:
        stage.tell(FormRing(epoch=epoch, ring=ring, blocks=blocks, micro_batches=len(stages)))
    for stage in stages:
        assert stage.hear(RingFormed).epoch == epoch


def _start(
    folder: Path, index: int, stages: int, layers: tuple[int, int], keys: KeyPair
) -> LoadStage:
    return LoadStage(
        pipeline="p1",
        stage=index,
        stages=stages,
        layers=layers,
        model_dir=str(folder),
        dtype="f32",
        device="cpu",
        threads=1,
        public_key=keys.public,
        secret_key=keys.secret,
        bind="127.0.0.1",
        ports=(20000, 65000),
        kv_bytes=1 << 20,
        block_size=4,
        max_model_len=256,
        settings=PipelineSettings(max_num_batched_tokens=16),
    )


class Daemon:
    """Submits requests and collects their tokens."""

    def __init__(self, client: Client[DataMessage]) -> None:
        self._client = client
        self.tokens: dict[str, list[int]] = {}
        self.rejected: dict[str, str] = {}
        #: The cached tokens that were reported with each request's first token.
        self.cached: dict[str, int] = {}
        self._over: dict[str, asyncio.Event] = {}

    def heard(self, message: DataMessage, _: memoryview | None) -> None:
        if isinstance(message, OutputTokens):
            for token in message.tokens:
                assert token.position == len(self.tokens[token.key])
                self.tokens[token.key].append(token.token)
                self.cached.setdefault(token.key, token.cached_tokens)
                if token.finish_reason is not None:
                    self._over[token.key].set()
        elif isinstance(message, Rejected):
            self.rejected[message.key] = message.reason
            self._over[message.key].set()

    def submit(self, key: str, prompt: list[int], epoch: int = 1, **settings: Any) -> None:
        sampling = SamplingParams(**{"temperature": 0.0, **settings})
        count = len(prompt)
        self.tokens[key] = list(prompt)
        self._over[key] = asyncio.Event()
        request = Request("m", (), TOKENS, sampling)
        self._client.send(Submit("p1", epoch, key, request, count, count))
        part = PromptFragment(key, 0, Payload("i32", (count,)))
        self._client.send(part, array("i", prompt).tobytes())

    def cancel(self, key: str) -> None:
        self._client.send(Cancel(key))

    async def finished(self, key: str) -> list[int]:
        await asyncio.wait_for(self._over[key].wait(), 60)
        return self.tokens[key]


@asynccontextmanager
async def daemon_of(head: Stage, keys: KeyPair) -> AsyncIterator[Daemon]:
    context = zmq.asyncio.Context()
    daemon: Daemon | None = None

    def heard(message: DataMessage, payload: memoryview | None) -> None:
        assert daemon is not None
        daemon.heard(message, payload)

    client = Client(
        context,
        keys,
        data_codec(),
        head.keys.public,
        [f"tcp://127.0.0.1:{head.port}"],
        events=ClientEvents(on_message=heard),
    )
    daemon = Daemon(client)
    client.start()
    try:
        await client.wait_connected(60)
        yield daemon
    finally:
        await client.close()
        context.term()


def reference(folder: Path, prompt: list[int]) -> list[int]:
    """What ``transformers`` generates greedily."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0]]


@pytest.fixture(scope="module")
def client_keys() -> KeyPair:
    return KeyPair.generate()


@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 2, 3]], ids=["one stage", "three stages"])
async def test_ring_generates_what_transformers_does(
    make_model: Any, tmp_path: Path, client_keys: KeyPair, cuts: list[int]
) -> None:
    folder = make_model(tmp_path / "model")
    prompts = [PROMPT[: 3 + length] + [length] * length for length in range(8)]
    expected = [reference(folder, prompt) for prompt in prompts]
    with ring_of(folder, cuts, client_keys) as stages:
        async with daemon_of(stages[0], client_keys) as daemon:
            for index, prompt in enumerate(prompts):
                daemon.submit(f"r{index}", prompt)
            results = [await daemon.finished(f"r{index}") for index in range(len(prompts))]
            assert results == expected

            # Prompts that begin with computed tokens find them cached, also where they share part
            # of a block.
            for index, prompt in enumerate(prompts):
                daemon.submit(f"again{index}", prompt)
            daemon.submit("turn", turn := [*expected[3], *PROMPT])
            again = [await daemon.finished(f"again{index}") for index in range(len(prompts))]
            turned = await daemon.finished("turn")
        await ends_with_its_pipe(stages[0])
    assert again == expected
    assert [daemon.cached[f"again{index}"] for index in range(len(prompts))] == [
        len(prompt) - 1 for prompt in prompts
    ]
    assert turned == reference(folder, turn)
    assert daemon.cached["turn"] == len(expected[3]) - 1


async def test_a_worker_asks_its_draft_model(
    make_model: Any, tmp_path: Path, client_keys: KeyPair
) -> None:
    """The draft model is the model itself, so its drafts are right."""
    folder = make_model(tmp_path / "model")
    expected = reference(folder, PROMPT)
    with ring_of(folder, [0, 2, 3], client_keys, draft=folder) as stages:
        for epoch in (1, 2):
            if epoch == 2:
                form(stages, epoch, 64)
            async with daemon_of(stages[0], client_keys) as daemon:
                daemon.submit(f"r{epoch}", PROMPT, epoch=epoch)
                assert await daemon.finished(f"r{epoch}") == expected
        stats = stages[0].hear(WorkerStats)
        while stats.counters["scheduler_finished_total"] < 2:
            stats = stages[0].hear(WorkerStats)
        counters = stats.counters
        assert counters["scheduler_draft_model_tokens_total"] > 10
        assert counters["scheduler_draft_tokens_accepted_total"] > 10
        assert counters["scheduler_draft_model_seconds_total"] > 0


@dataclass
class Pair:
    """A ring of two workers, which each test forms again."""

    folder: Path
    stages: list[Stage]
    epoch: int = 1


@pytest.fixture(scope="module")
def pair(
    make_model: Any, tmp_path_factory: pytest.TempPathFactory, client_keys: KeyPair
) -> Iterator[Pair]:
    folder = make_model(tmp_path_factory.mktemp("pair") / "model")
    with ring_of(folder, [0, 2, 3], client_keys) as stages:
        yield Pair(folder, stages)


async def test_cancel_new_epoch_and_penalties(pair: Pair, client_keys: KeyPair) -> None:
    stages, epoch = pair.stages, pair.epoch
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    async with daemon_of(stages[0], client_keys) as daemon:
        daemon.submit("cancelled", PROMPT, epoch)
        daemon.cancel("cancelled")
        daemon.submit("penalized", PROMPT, epoch, **penalties)
        first = await daemon.finished("penalized")
        plain = reference(pair.folder, PROMPT)
        assert first != plain

        stats = stages[0].hear(WorkerStats)
        # The first reports may be older than the requests.
        while (
            stats.counters["scheduler_finished_total"] < 1 or stats.gauges["scheduler_blocks_used"]
        ):
            stats = stages[0].hear(WorkerStats)
        assert stats.counters["scheduler_finished_total"] == 1

        pair.epoch += 1
        form(stages, pair.epoch, 64)
        daemon.submit("old", PROMPT, epoch)
        await daemon.finished("old")
        assert daemon.rejected == {"old": "epoch"}
        daemon.submit("again", PROMPT, pair.epoch, **penalties)
        assert await daemon.finished("again") == first
        daemon.submit("plain", PROMPT, pair.epoch)
        assert await daemon.finished("plain") == plain


async def test_workers_hold_other_layers_without_another_process(
    pair: Pair, client_keys: KeyPair
) -> None:
    expected = reference(pair.folder, PROMPT)
    stages = pair.stages
    ports = [stage.port for stage in stages]
    for cuts in ([0, 1, 3], [0, 2, 3]):
        pair.epoch += 1
        for index, layers in enumerate(itertools.pairwise(cuts)):
            stages[index].tell(_start(pair.folder, index, 2, layers, stages[index].keys))
        loaded = [stage.hear(WorkerLoaded) for stage in stages]
        assert [each.port for each in loaded] == ports
        form(stages, pair.epoch, min(each.max_blocks for each in loaded))
        async with daemon_of(stages[0], client_keys) as daemon:
            daemon.submit("r", PROMPT, pair.epoch)
            assert await daemon.finished("r") == expected


@contextmanager
def spare_of(folder: Path, *, ready: bool = True) -> Iterator[Stage]:
    """A standby worker for a stage of ``folder``; ``ready`` waits until it is prepared."""
    process = subprocess.Popen(
        [sys.executable, "-m", "molinkd.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    spare = Stage(process, KeyPair.generate())
    warm = WarmUp(
        layers=(1, 2), model_dir=str(folder), dtype="f32", device="cpu", threads=1, block_size=4
    )
    spare.tell(warm)
    try:
        if ready:
            spare.hear(WarmedUp)
        yield spare
    finally:
        end(spare)


@pytest.mark.parametrize("ready", [True, False])
async def test_a_standby_worker_serves_as_any_worker(
    make_model: Any, tmp_path: Path, client_keys: KeyPair, ready: bool
) -> None:
    folder = make_model(tmp_path / "model")
    with spare_of(folder, ready=ready) as spare:
        spare.tell(_start(folder, 0, 1, (0, 3), spare.keys))
        key = client_keys.public
        spare.tell(PeerKeys(peers=(PeerKey(peer=derive_peer_id(key), public_key=key),)))
        loaded = spare.hear(WorkerLoaded)
        spare.port = loaded.port
        form([spare], 1, loaded.max_blocks)
        async with daemon_of(spare, client_keys) as daemon:
            daemon.submit("r", PROMPT)
            assert await daemon.finished("r") == reference(folder, PROMPT)


async def test_a_standby_worker_for_a_removed_model_stays_and_ends_with_its_pipe(
    tmp_path: Path,
) -> None:
    with spare_of(tmp_path / "none") as spare:
        assert spare.process.poll() is None
        await ends_with_its_pipe(spare)
