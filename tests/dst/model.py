"""A model whose every token depends on all earlier ones, through the ring's rows and KV.

A layer's value at a position is a hash of its input and of all earlier values in its KV blocks. A
row that is lost, duplicated or reordered, or a block with wrong content, changes every later token;
the assignment of layers to stages changes none.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random

from molink.facts.images import ImageSpan
from molink.ring.step import StepInput, StepOutput, StepResult
from molink.wire.messages.data_plane import (
    Admit,
    RequestSlice,
    SampledId,
    SamplerOutput,
    SamplingParams,
)
from tests.dst.process import Process

VOCABULARY = 5000
#: Bytes of a row.
HIDDEN = 8
#: Tokens of a KV block: few, for many blocks.
BLOCK = 4
_MASK = (1 << 63) - 1


def layer_value(layer: int, kv: Sequence[int]) -> int:
    """A layer's value for the last of ``kv``, given all others."""
    return hash((layer, *kv)) & _MASK


def draw(value: int, sampling: SamplingParams, position: int, history: Sequence[int] | None) -> int:
    """The token at ``position``."""
    seen = hash(tuple(history)) if history is not None else 0
    return (hash((value, sampling.seed, position, seen)) & _MASK) % VOCABULARY


def reference(
    layers: int, prompt: Sequence[int], count: int, stop: Sequence[int], sampling: SamplingParams
) -> list[int]:
    """The expected answer."""
    kv: list[list[int]] = [[] for _ in range(layers)]
    tokens = list(prompt)
    done = 0
    while len(tokens) < len(prompt) + count:
        value = 0
        for token in tokens[done:]:
            value = token
            for layer, seen in enumerate(kv):
                seen.append(value)
                value = layer_value(layer, seen)
        done = len(tokens)
        history = tokens if sampling.needs_history else None
        tokens.append(draw(value, sampling, done, history))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class State:
    """One request at one stage."""

    __slots__ = ("blocks", "history", "last", "sampling")

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.blocks: list[int] = []
        self.history: list[int] = []
        self.last = (-1, -1)


class Requests:
    """Requests of one stage and epoch; implements :class:`molink.ring.stage.StageRequests`."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def admit_request(self, message: Admit) -> None:
        self._states[message.request] = State(message.sampling_params)

    def add_history(self, request: int, first: int, ids: memoryview) -> None:
        assert first == len(self._states[request].history)
        self._states[request].history.extend(ids)

    def set_images(self, request: int, spans: Sequence[ImageSpan], rows: object) -> None:
        """Do nothing: its prompts have no images."""

    def append_blocks(self, request: int, blocks: Sequence[int]) -> None:
        self._states[request].blocks.extend(blocks)

    def release_request(self, request: int) -> None:
        self._states.pop(request, None)

    def __getitem__(self, request: int) -> State:
        return self._states[request]

    def __len__(self) -> int:
        return len(self._states)


class Executor:
    """Runs the steps of a stage with ``layers``; KV starts as garbage, like real memory."""

    def __init__(
        self,
        process: Process,
        layers: tuple[int, int],
        last: bool,
        blocks: int,
        requests: Requests,
        rng: Random,
    ) -> None:
        self._process = process
        self._layers = range(*layers)
        self._first, self._last = layers[0] == 0, last
        self._kv = {layer: [-1 - layer] * (blocks * BLOCK) for layer in self._layers}
        self._requests = requests
        self._rng = rng
        #: Factor on the duration of steps.
        self.slow = 1.0

    def submit_step(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        seconds = self._rng.uniform(0.03, 0.15) * self.slow
        self._process.later(seconds, self._end, step_inputs, done, seconds)

    def _end(
        self, step_inputs: Sequence[StepInput], done: Callable[[StepResult], None], seconds: float
    ) -> None:
        groups = [rows for segment in step_inputs for rows in segment.volume.slices]
        for rows in groups:
            self._requests[rows.request].blocks.extend(rows.blocks)
        for rows in groups:
            if rows.copy_from_block >= 0:
                self._copy(rows)
        done(StepResult([self._run(segment) for segment in step_inputs], seconds, None))

    def _copy(self, rows: RequestSlice) -> None:
        """Copy the positions before the first row of a block from another block."""
        count = rows.start % BLOCK
        there = rows.copy_from_block * BLOCK
        here = self._requests[rows.request].blocks[rows.start // BLOCK] * BLOCK
        for kv in self._kv.values():
            kv[here : here + count] = kv[there : there + count]

    def _run(self, segment: StepInput) -> StepOutput:
        values = self._input(segment)
        volume, out, at = segment.volume, array("Q"), 0
        choices = []
        for rows in volume.slices:
            part = values[at : at + rows.count]
            at += rows.count
            state = self._requests[rows.request]
            for layer in self._layers:
                part = self._layer(layer, part, rows.start, state.blocks)
            out.extend(part)
            if rows.sample and self._last:
                choices += self._sample(rows, part)
        if self._last:
            return StepOutput(volume, None, SamplerOutput(volume.seq, tuple(choices)))
        return StepOutput(volume, memoryview(out.tobytes()), None)

    def _sample(self, rows: RequestSlice, values: Sequence[int]) -> Iterator[SampledId]:
        """Sample after the last row; with drafts, up to the first mismatch."""
        state = self._requests[rows.request]
        if not rows.continues_from(*state.last):
            return
        history = state.history if state.sampling.needs_history else None
        before = rows.count - len(rows.verified_drafts)
        for at, draft in enumerate((*rows.verified_drafts, None), before):
            token = draw(values[at - 1], state.sampling, rows.start + at, history)
            if history is not None:
                history.append(token)
            state.last = rows.start + at, token
            yield SampledId(rows.request, rows.start + at, token)
            if token != draft:
                return

    def _input(self, segment: StepInput) -> Sequence[int]:
        data = segment.data
        values = list(data) if self._first else memoryview(data).cast("B").cast("Q").tolist()
        if segment.row_indices is None:
            return values
        return [values[index] for index in segment.row_indices]

    def _layer(
        self, layer: int, values: Sequence[int], start: int, blocks: Sequence[int]
    ) -> list[int]:
        kv = self._kv[layer]
        seen: list[int] = []
        for block in blocks[: -(-start // BLOCK)]:
            seen += kv[block * BLOCK : block * BLOCK + BLOCK]
        del seen[start:]
        out = []
        for position, value in enumerate(values, start):
            kv[blocks[position // BLOCK] * BLOCK + position % BLOCK] = value
            seen.append(value)
            out.append(layer_value(layer, seen))
        return out
