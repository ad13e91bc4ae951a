"""Attention backends are compared by a clock that only they advance."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from molink.errors import UsageError
from molink.stage.batch import SequenceRows
from molink.stage.diagnostics import attention_timing
from molink.stage.diagnostics.attention_timing import is_slower
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES

SHAPES = replace(
    USUAL_SHAPES, attention=replace(USUAL_SHAPES.attention, kv_heads=1, groups=2, head_dim=16)
)
CPU = torch.device("cpu")


class Clock:
    """Backends by name that take these seconds for a decode step and for a chunk."""

    def __init__(self, **seconds: tuple[float, float]) -> None:
        self.now = 0.0
        self.steps: list[Sequence[SequenceRows]] = []
        self._seconds = seconds

    def create_attention(self, name: str, *_: Any) -> Any:
        if name not in self._seconds:
            raise UsageError(f"no {name} here")

        def prepare_layers(step: Sequence[SequenceRows], *_: Any) -> Callable[..., None]:
            self.steps.append(step)
            # The first call compiles.
            remaining = [100.0]

            def attend(*_: Any) -> None:
                self.now += self._seconds[name][len(step) == 1]
                self.now += remaining.pop() if remaining else 0.0

            return attend

        return SimpleNamespace(prepare_layers=prepare_layers)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """``timed(triton=(decode, chunk), …)``."""

    def install(**seconds: tuple[float, float]) -> Clock:
        clock = Clock(**seconds)
        monkeypatch.setattr(attention_timing, "create_attention", clock.create_attention)
        monkeypatch.setattr(
            attention_timing, "time", SimpleNamespace(perf_counter=lambda: clock.now)
        )
        return clock

    return install


def compare() -> bool:
    return is_slower("triton", "gather", SHAPES, torch.float32, CPU)


@pytest.mark.parametrize(
    ("decode", "chunk", "slower"), [(3.0, 0.5, True), (3.0, 0.25, False), (0.1, 9.0, False)]
)
def test_decode_rows_and_chunks_count_alike(
    timed: Callable[..., Clock], decode: float, chunk: float, slower: bool
) -> None:
    clock = timed(triton=(decode, chunk), gather=(1.0, 1.0))
    assert compare() is slower
    mixes = [(len(step), sum(sequence.count for sequence in step)) for step in clock.steps]
    assert mixes == [(32, 32), (32, 32), (1, 256), (1, 256)]


@pytest.mark.parametrize("missing", ["triton", "gather"])
def test_what_does_not_work_is_not_compared(timed: Callable[..., Clock], missing: str) -> None:
    works = {"triton": (9.0, 9.0), "gather": (1.0, 1.0)}
    del works[missing]
    assert not timed(**works).steps
    assert not compare()


def test_little_memory_is_no_reason_against_a_kernel(
    timed: Callable[..., Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = timed(triton=(9.0, 9.0), gather=(1.0, 1.0))
    monkeypatch.setattr(attention_timing, "_MAX_BYTES", 3 * 1024 * 2 * 16 * 4)
    assert compare()
    assert len(clock.steps[0]) == 3
    errors: list[Exception] = [torch.OutOfMemoryError(), RuntimeError("launch failed")]

    def fail(*_: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(attention_timing, "KVPool", fail)
    assert not compare()
    with pytest.raises(RuntimeError, match="launch failed"):
        compare()
