"""Copies between the host and a device."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from molink.stage import device_copy as to_device
from molink.stage.device_copy import (
    StagingBuffer,
    download_rows,
    gather_rows,
    has_pinned,
    pinned_error,
    upload_integers,
    upload_tensor,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    return torch.device(request.param)


def test_a_cpu_gets_no_copy() -> None:
    tensor = torch.arange(4)
    assert upload_tensor(tensor, CPU) is tensor
    numbers = array("q", [3, 1, 2])
    assert upload_integers(numbers, CPU).data_ptr() == numbers.buffer_info()[0]


def test_numbers(device: torch.device) -> None:
    assert upload_tensor(torch.tensor([1.5, -2.0]), device).tolist() == [1.5, -2.0]
    there = upload_integers(range(5), device)
    assert (there.device, there.dtype, there.tolist()) == (device, torch.int64, [0, 1, 2, 3, 4])
    assert upload_tensor(there, device) is there
    assert upload_integers([], device).shape == (0,)


def test_numbers_of_a_step_are_one_copy(device: torch.device) -> None:
    target = torch.zeros(1 << 18, dtype=torch.uint8, device=device)
    staging = StagingBuffer(device)
    for first in range(5):
        many = array("i", range(first, first + (first << 13)))
        staging.upload(target, (array("q", [first, -1]), many))
        assert target[:16].view(torch.int64).tolist() == [first, -1]
        assert target[16 : 16 + 4 * len(many)].view(torch.int32).tolist() == many.tolist()


def test_numbers_in_flight_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, host_memory: None
) -> None:
    pending, came = list[Callable[[], object]](), list[bytes]()

    class Target:
        def __getitem__(self, _: slice) -> "Target":
            return self

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            pending.append(lambda: came.append(bytes(source.tolist())))

    class Event:
        def record(self) -> None:
            self._number = len(pending)

        def synchronize(self) -> None:
            while len(came) < self._number:
                pending[len(came)]()

    monkeypatch.setattr(to_device, "has_pinned", lambda _: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    staging, target = StagingBuffer(torch.device("cuda:0")), Target()
    for number in range(5):
        staging.upload(target, (array("b", [number]),))
    assert came == [bytes([number]) for number in range(3)]  # two are in flight
    for copy in pending[3:]:
        copy()
    assert came == [bytes([number]) for number in range(5)]


def test_rows(device: torch.device) -> None:
    rows = torch.arange(12, device=device).view(6, 2)
    assert gather_rows(rows, [1, 2, 3]).data_ptr() == rows[1:].data_ptr()
    assert gather_rows(rows, [0, 3, 5]).tolist() == [[0, 1], [6, 7], [10, 11]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_come_whole(device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(7, 5).to(dtype)
    parts = download_rows([part.to(device) for part in (rows[:3], rows[3:3], rows[3:])])
    assert [len(part) for part in parts] == [3 * 5 * dtype.itemsize, 0, 4 * 5 * dtype.itemsize]
    both = torch.frombuffer(parts[0] + parts[2], dtype=dtype).view(7, 5)
    assert torch.equal(both, rows)
    parts[0][0] ^= 255
    assert torch.equal(rows[3:], torch.frombuffer(parts[2], dtype=dtype).view(4, 5))


class LateCopies:
    """Copies to the host that end only when they are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, done: int = 99) -> None:
        """``done``: how many of the copies end at all."""
        self.waits = 0
        self._done = done
        self._waiting: list[Callable[[], object]] = []
        late, empty = self, torch.empty

        class Pinned(torch.Tensor):
            def copy_(self, source: Any, non_blocking: bool = False) -> torch.Tensor:
                assert non_blocking
                late._waiting.append(lambda: torch.Tensor.copy_(self, source.rows))
                return self

        def pinned(shape: torch.Size, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
            assert pin_memory
            return empty(shape, dtype=dtype).fill_(7.0).as_subclass(Pinned)

        monkeypatch.setattr(to_device, "has_pinned", lambda _: True)
        monkeypatch.setattr(torch, "empty", pinned)
        stream = SimpleNamespace(synchronize=self._wait)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def _wait(self) -> None:
        self.waits += 1
        for copy in self._waiting[: self._done]:
            copy()


def on_a_card(rows: torch.Tensor) -> Any:
    return SimpleNamespace(
        device=torch.device("cuda:0"), shape=rows.shape, dtype=rows.dtype, rows=rows
    )


def test_rows_are_read_once_they_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, 4)
    late = LateCopies(monkeypatch)
    parts = download_rows([on_a_card(rows[:1]), on_a_card(rows[1:])])
    assert late.waits == 1
    assert torch.equal(torch.frombuffer(parts[0] + parts[1], dtype=rows.dtype).view(3, 4), rows)


def test_rows_that_never_come_are_no_rows_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, 4)
    LateCopies(monkeypatch, done=1)
    parts = download_rows([on_a_card(rows[:1]), on_a_card(rows[1:])])
    first, second = (torch.frombuffer(part, dtype=rows.dtype).view(-1, 4) for part in parts)
    assert torch.equal(first, rows[:1])
    assert second[:, 0].isnan().all()


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU's copies go from host memory to host memory."""
    empty = torch.empty
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(
        torch, "empty", lambda *given, pin_memory=False, **more: empty(*given, **more)
    )


@pytest.mark.usefixtures("host_memory")
def test_copies_that_are_right_are_not_waited_for() -> None:
    assert pinned_error(CPU) == 0
    assert has_pinned.__wrapped__(CPU)


@pytest.mark.usefixtures("host_memory")
def test_memory_that_is_handed_out_too_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared: dict[int, torch.Tensor] = {}

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        return shared.setdefault(tensor.numel(), tensor.clone()).copy_(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    assert pinned_error(CPU) > 0
    assert not has_pinned.__wrapped__(CPU)
    assert "pinned copies are wrong on cpu: using synchronous copies" in caplog.text


@pytest.mark.usefixtures("host_memory")
def test_rows_that_come_late_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        to_device,
        "_copy_pinned",
        lambda parts: [torch.full_like(part, torch.nan) for part in parts],
    )
    assert pinned_error(CPU) == float("inf")


def test_without_pinned_memory_copies_are_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: OS call failed")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert not has_pinned.__wrapped__(CPU)
    assert "pinned copies fail on cpu (CUDA error: OS call failed)" in caplog.text
    monkeypatch.setattr(to_device, "has_pinned", lambda _: False)
    meta = torch.device("meta")
    assert upload_tensor(torch.arange(3), meta).device == meta
    StagingBuffer(meta).upload(torch.zeros(2, dtype=torch.uint8, device=meta), [array("b", [1])])
    rows = torch.randn(3, 4)
    card: Any = on_a_card(rows)
    card.cpu = lambda: rows
    assert download_rows([card])[0] == download_rows([rows])[0]


@pytest.mark.gpu
def test_many_uploads_do_not_overtake_each_other() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    device = torch.device("cuda:0")
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for index in range(200):
        busy = (busy @ busy).div_(busy.norm() + 1.0)
        sums.append(upload_integers([index] * 4096, device).sum())
    assert torch.stack(sums).tolist() == [4096 * index for index in range(200)]
