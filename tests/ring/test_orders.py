"""Logits don't depend on the order of deliveries, on cancelled requests or on shared blocks.

The same holds if prefill rows arrive and run in sub-chunks of any size.
"""

import itertools
import random
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.scoreboard import Scoreboard
from molink.ring.step import parse_block_ids
from molink.stage.batch import SequenceRows, StageInput, StageOutput
from molink.stage.stage import Stage
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Release,
    RequestSlice,
    SamplingParams,
    Tombstone,
    Volume,
)
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step

BLOCK = 4
A, C, B, D, E = range(5)
#: B begins with A's first 8 tokens and reads them from A's blocks; D gets the blocks of C. E begins
#: with A's first 11: it reads 8 from A's blocks and copies 3 that A continues writing after.
TOKENS = {
    A: [5, 9, 2, 7, 1, 8, 3, 6, 4, 11, 12, 13, 14],
    B: [5, 9, 2, 7, 1, 8, 3, 6, 40, 41, 42, 43],
    C: [30, 31, 32, 33, 34, 35, 36, 37, 38],
    D: [50, 51, 52, 53, 54, 55, 56, 57, 58],
    E: [5, 9, 2, 7, 1, 8, 3, 6, 4, 11, 12, 60, 61, 62],
}
GREEDY = SamplingParams(temperature=0.0)

#: Expected samples, independent of C.
WANTED = {
    *((A, position) for position in range(8, 14)),
    *((B, position) for position in range(10, 13)),
    *((D, position) for position in range(7, 10)),
    *((E, position) for position in range(13, 15)),
}

Logits = dict[tuple[int, int], torch.Tensor]


class RecordingStage:
    """A stage that records its last output."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.output: torch.Tensor | None = None

    def compute_step(self, batch: StageInput, between_layers: object = None) -> StageOutput:
        output = self._stage.compute_step(batch)
        self.output = output.rows
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class AnyPieces:
    """Cuts sub-chunks of random sizes, and sometimes waits for more rows."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next_rows(self, here: int, coming: int, piggybacked: int, slowdown: float) -> int:
        return self._random.randint(0 if coming else 1, here)


@dataclass(frozen=True)
class More:
    """A message with further rows of a volume."""

    seq: int


@dataclass
class Hop:
    """One stage, its two incoming channels and its scoreboard.

    With ``split``, some of the next bulk rows may arrive before the rest.
    """

    stage: Any
    scoreboard: Scoreboard
    split: random.Random | None = None
    decode: deque[tuple[Any, Any]] = field(default_factory=deque)
    bulk: deque[tuple[Any, Any]] = field(default_factory=deque)
    requests: RequestTable = field(default_factory=RequestTable)
    #: Rows of volumes that have begun to arrive, with room for all, and how many are there.
    buffers: dict[int, tuple[bytearray, int]] = field(default_factory=dict)

    def put(self, body: Any, data: Any) -> None:
        bulk = isinstance(body, More) or (isinstance(body, Volume) and body.prefill)
        (self.bulk if bulk else self.decode).append((body, data))

    def deliver(self, channel: deque[tuple[Any, Any]]) -> None:
        body, data = channel.popleft()
        if channel is not self.bulk or isinstance(data, list):
            self.scoreboard.on_message(body, data, 0.0)
            return
        size = self.stage.config.hidden_size * 4
        rows = count = len(data) // size
        if self.split is not None:
            count = self.split.randint(1, rows)
        if count < rows:
            channel.appendleft((More(body.seq), data[count * size :]))
        self._arrive(body, data[: count * size], size)

    def _arrive(self, body: Any, data: bytearray, size: int) -> None:
        if isinstance(body, Volume):
            room = bytearray(body.count * size)
            self.buffers[body.seq] = room, 0
        room, before = self.buffers[body.seq]
        after = before + len(data) // size
        room[before * size : after * size] = data
        self.buffers[body.seq] = room, after
        if isinstance(body, Volume):
            self.scoreboard.on_message(body, room, 0.0, after)
        else:
            self.scoreboard.extend_volume(body.seq, after, 0.0)


def rows(
    request: int, start: int, count: int, after: int, blocks: tuple[int, ...] = ()
) -> RequestSlice:
    return RequestSlice(request, start, count, after, blocks, sample=True)


def volume(seq: int, *slices: RequestSlice, prefill: bool) -> tuple[Volume, list[int]]:
    tokens = [
        token for each in slices for token in TOKENS[each.request][each.start :][: each.count]
    ]
    return Volume(seq, prefill, slices, Payload("i32", (len(tokens),))), tokens


def script() -> list[tuple[Any, Any]]:
    """The messages to stage 0, up to the release of C."""
    return [
        (Admit(1, A, GREEDY, 9), None),
        (Admit(2, C, GREEDY, 8), None),
        volume(3, rows(A, 0, 8, 1, (3, 7)), rows(C, 0, 4, 2, (5,)), prefill=True),
        volume(4, rows(A, 8, 1, 3, (1,)), prefill=True),
        volume(5, rows(A, 9, 1, 4), prefill=False),
        (Admit(6, B, GREEDY, 9), None),
        # B reads what volume 3 writes for A into blocks 3 and 7.
        volume(7, rows(B, 8, 2, 6, (3, 7, 9)), rows(C, 4, 3, 3, (6,)), prefill=True),
        volume(8, rows(A, 10, 1, 5), rows(B, 10, 1, 7), prefill=False),
        (Release(9, C, 7), None),
        volume(10, rows(A, 11, 1, 8), rows(B, 11, 1, 8), prefill=False),
        volume(11, rows(A, 12, 1, 10, (8,)), prefill=False),
    ]


def afterword() -> list[tuple[Any, Any]]:
    """The messages after C's release went round the ring, with E's cached blocks."""
    return [
        (Admit(12, D, GREEDY, 8), None),
        volume(13, rows(D, 0, 7, 12, (6, 5)), prefill=True),
        volume(14, rows(D, 7, 1, 13), prefill=False),
        volume(15, rows(D, 8, 1, 14, (2,)), prefill=False),
        (Admit(16, E, GREEDY, 14), None),
        (BlockTable(17, E, Payload("i32", (2,))), array("i", (3, 7)).tobytes()),
        volume(18, RequestSlice(E, 11, 2, 17, (0, 4), True, copy_from_block=1), prefill=True),
        volume(19, rows(E, 13, 1, 18), prefill=False),
    ]


class Driver:
    """Runs the script over a ring of stages; ``pick`` chooses what happens next."""

    def __init__(self, stages: list[Stage], pick: Any, sub_chunks: int | None = None) -> None:
        self.hops = [Hop(RecordingStage(stage), Scoreboard()) for stage in stages]
        if sub_chunks is not None:
            for hop in self.hops:
                hop.scoreboard = Scoreboard(sub_chunk_policy=AnyPieces(sub_chunks))
                hop.split = random.Random(sub_chunks)
        #: Number of sub-chunks that were neither the first nor the only one of their volume.
        self.later_sub_chunks = 0
        self._pick = pick
        self.logits: Logits = {}
        self.ended: list[Any] = []

    def run(self) -> Logits:
        self._drive(deque(script()), deque(afterword()))
        return self.logits

    def settle(self) -> None:
        """Run until nothing is in flight."""
        self._drive(deque(), deque())

    def _drive(self, todo: deque[Any], later: deque[Any]) -> None:
        while True:
            moves: list[Any] = [hop.decode for hop in self.hops if hop.decode]
            moves += [hop.bulk for hop in self.hops if hop.bulk]
            moves += [hop for hop in self.hops if hop.scoreboard.num_queued]
            if todo:
                moves.append(todo)
            elif later and (A, 11) in self.logits and self._released():
                moves.append(later)
            if not moves:
                break
            self._do(self._pick(moves), todo, later)
        for hop in self.hops:
            hop.scoreboard.validate()
            assert hop.scoreboard.num_waiting == 0

    def _released(self) -> bool:
        return any(isinstance(body, Release) for body in self.ended)

    def _do(self, move: Any, todo: deque[Any], later: deque[Any]) -> None:
        if move is todo or move is later:
            self.hops[0].put(*move.popleft())
            return
        for index, hop in enumerate(self.hops):
            if move is hop:
                self._compute(index)
            elif move is hop.decode or move is hop.bulk:
                hop.deliver(move)
                self._forward(index, hop.scoreboard.complete_volumes((), 0.0))

    def _compute(self, index: int) -> None:
        hop = self.hops[index]
        work = hop.scoreboard.next_step(0.0)
        if work is None:
            return
        self.later_sub_chunks += sum(part.first_row > 0 for part in work.inputs)
        results = run_step(hop.stage, hop.requests, work.inputs)
        if hop.stage.is_last:
            slices = [
                each
                for step_input in work.inputs
                for each in step_input.volume.slices
                if each.sample
            ]
            for each, logits in zip(slices, hop.stage.output, strict=True):
                self.logits[each.request, each.start + each.count] = logits.clone()
        else:
            for part, result in zip(work.inputs, results, strict=True):
                body = More(part.volume.seq) if part.first_row else part.full_volume
                self.hops[index + 1].put(body, bytearray(result.rows))
        self._forward(index, hop.scoreboard.complete_volumes(work.seqs, 0.0))

    def _forward(self, index: int, controls: Any) -> None:
        for control in controls:
            if isinstance(control.body, Admit):
                self.hops[index].requests.admit_request(control.body)
            elif isinstance(control.body, BlockTable):
                blocks = parse_block_ids(control.body, control.data)
                self.hops[index].requests.append_blocks(control.body.request, blocks)
            elif isinstance(control.body, Release):
                self.hops[index].requests.release_request(control.body.request)
            if index + 1 < len(self.hops):
                self.hops[index + 1].put(control.body, control.data)
            else:
                self.ended.append(control.body)


@pytest.fixture(scope="module")
def stages(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Stage]:
    torch.set_num_threads(1)
    folder = ModelFolder.open(make_model(tmp_path_factory.mktemp("orders")))
    return [Stage.load_layers(folder, (layer, layer + 1), "cpu", "f32") for layer in range(3)]


@pytest.fixture(scope="module")
def undisturbed(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Logits:
    """Logits of each request in one batch of its own, on the whole model."""
    folder = ModelFolder.open(make_model(tmp_path_factory.mktemp("whole")))
    stage = Stage.load_layers(folder, (0, 3), "cpu", "f32")
    expected: Logits = {}
    for request, tokens in TOKENS.items():
        stage.allocate_kv_pool(8, BLOCK)
        batch = StageInput(
            tokens=torch.tensor(tokens),
            hidden=None,
            sequences=(SequenceRows(0, len(tokens), range(4)),),
            logit_rows=tuple(range(len(tokens))),
        )
        for index, logits in enumerate(stage.forward(batch)):
            expected[request, index + 1] = logits
    return expected


def in_turn(moves: list[Any]) -> Any:
    return moves[-1]


def bulk_first(moves: list[Any]) -> Any:
    """Prefill overtakes: bulk deliveries and steps run before control messages."""
    return moves[-1] if len(moves) == 1 else moves[-2]


def decode_first(moves: list[Any]) -> Any:
    return moves[0]


def shuffled(seed: int) -> Any:
    return random.Random(seed).choice


ORDERS = {
    "in turn": in_turn,
    "bulk first": bulk_first,
    "decode first": decode_first,
    **{f"random {seed}": shuffled(seed) for seed in range(40)},
}


@pytest.mark.parametrize("order", ORDERS)
def test_logits_do_not_depend_on_the_order_of_arrival(
    stages: list[Stage], undisturbed: Logits, order: str
) -> None:
    for stage in stages:
        stage.allocate_kv_pool(10, BLOCK)
    driver = Driver(stages, ORDERS[order])
    logits = driver.run()

    kept = {key: value for key, value in logits.items() if key[0] != C}
    assert set(kept) == WANTED
    for key, value in logits.items():
        torch.testing.assert_close(value, undisturbed[key], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_logits_do_not_depend_on_sub_chunks(
    stages: list[Stage], undisturbed: Logits, seed: int
) -> None:
    for stage in stages:
        stage.allocate_kv_pool(10, BLOCK)
    driver = Driver(stages, shuffled(seed), seed)
    logits = driver.run()
    assert driver.later_sub_chunks > 5
    assert {key for key in logits if key[0] != C} == WANTED
    for key, value in logits.items():
        torch.testing.assert_close(value, undisturbed[key], atol=1e-4, rtol=1e-4)


def test_cancel_before_its_volumes_leaves_tombstones(stages: list[Stage]) -> None:
    """Volumes with only rows of a cancelled request are not computed at later stages."""
    for stage in stages:
        stage.allocate_kv_pool(10, BLOCK)
    driver = Driver(stages, in_turn)
    first = driver.hops[0]
    first.scoreboard.on_message(Admit(1, C, GREEDY, 8), None, 0.0)
    first.scoreboard.on_message(Release(3, C, 2), None, 0.0)
    first.scoreboard.on_message(*volume(2, rows(C, 0, 4, 1, (5,)), prefill=True), 0.0)
    bodies = [control.body for control in first.scoreboard.complete_volumes((), 0.0)]
    assert bodies == [Admit(1, C, GREEDY, 8), Tombstone(2), Release(3, C, 2)]
    assert first.scoreboard.next_step(0.0) is None


@torch.inference_mode()
def spoil(stage: Stage, slots: list[int]) -> None:
    """Write NaN to these slots of the pool, in all layers."""
    pool = stage._pool
    assert pool is not None
    rows = torch.full((len(slots), 2, pool.kv_heads, pool.head_dim), torch.nan)
    for layer in range(stage.layers[1] - stage.layers[0]):
        pool.write_rows(layer, torch.tensor(slots), rows)


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3)], ids=["whole", "two stages"])
def test_copied_positions_give_the_same_logits(
    make_model: Any, tmp_path: Any, undisturbed: Logits, cuts: tuple[int, ...]
) -> None:
    """The source's positions after the copied ones have no effect, valid or not."""
    folder = ModelFolder.open(make_model(tmp_path))
    ranges = itertools.pairwise(cuts)
    stages = [Stage.load_layers(folder, layers, "cpu", "f32") for layers in ranges]
    for stage in stages:
        stage.allocate_kv_pool(10, BLOCK)
    driver = Driver(stages, in_turn)
    parts = [
        (Admit(1, A, GREEDY, 13), None),
        volume(2, rows(A, 0, 11, 1, (3, 7, 1)), prefill=True),
        volume(3, rows(A, 11, 1, 2), prefill=False),
        (Admit(4, E, GREEDY, 14), None),
        (BlockTable(5, E, Payload("i32", (2,))), array("i", (3, 7)).tobytes()),
        volume(6, RequestSlice(E, 11, 1, 5, (0,), True, copy_from_block=1), prefill=True),
        volume(7, rows(E, 12, 2, 6, (4,)), prefill=True),
    ]
    for number, part in enumerate(parts):
        if number == 3:
            # The target block with an earlier request's data, and the source's position after the
            # copied ones.
            for stage in stages:
                spoil(stage, [0, 1, 2, 3, BLOCK + 3])
        driver.hops[0].put(*part)
        driver.settle()
    assert {key for key in driver.logits if key[0] == E} == {(E, 12), (E, 14)}
    for key, value in driver.logits.items():
        torch.testing.assert_close(value, undisturbed[key], atol=1e-4, rtol=1e-4)
