"""GPU utilization by other programs, with a fake driver."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from molink.facts.device import Device
from molinkd.peer.agent import pause_controller as gpu_use
from molinkd.peer.agent.pause_controller import GpuMonitor, OwnGpuUsage, open_gpu

CARD = "NVIDIA GeForce RTX 3090"


class NVMLError(Exception):
    pass


@dataclass
class Driver:
    """The used part of ``pynvml``; ``None`` means that the driver doesn't report the value."""

    NVMLError = NVMLError
    whole: int | None = 0
    running: list[int] | None = field(default_factory=list)
    #: Process id, time, percent.
    samples: list[tuple[int, int, int]] | None = None
    display: int | None = 1
    names: tuple[str, ...] = (CARD,)
    begun: bool = True
    ended: int = 0
    since: list[int] = field(default_factory=list)

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.begun:
            raise NVMLError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetDisplayActive(self, _handle: int) -> int:  # noqa: N802
        return self._told(self.display)

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._told(self.whole))

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[SimpleNamespace]:  # noqa: N802
        if self.running is None:
            raise NVMLError("not supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.running]

    def nvmlDeviceGetProcessUtilization(self, _: int, since: int) -> list[SimpleNamespace]:  # noqa: N802
        self.since.append(since)
        if self.samples is None:
            raise NVMLError("not supported")
        return [SimpleNamespace(pid=p, timeStamp=t, smUtil=u) for p, t, u in self.samples]

    @staticmethod
    def _told(value: int | None) -> int:
        if value is None:
            raise NVMLError("not supported")
        return value


@pytest.mark.parametrize(
    ("driver", "own", "share"),
    [
        # WDDM, or a card without usage per process: what our stages don't use counts as others'
        # usage.
        (Driver(whole=90), OwnGpuUsage(), 0.9),
        (Driver(whole=90), OwnGpuUsage([1], 0.3), 0.6),
        (Driver(whole=50), OwnGpuUsage([1], 0.8), 0.0),
        (Driver(whole=None), OwnGpuUsage(), 0.0),
        # Usage per process is known: a game slows our stages down.
        (Driver(100, [1], [(1, 5, 40), (2, 5, 60)]), OwnGpuUsage([1], 1.0), 0.6),
        (Driver(100, [1], [(2, 5, 60), (2, 4, 10), (3, 5, 10)]), OwnGpuUsage([1], 1.0), 0.7),
        (Driver(100, [1], [(1, 5, 100)]), OwnGpuUsage([1], 1.0), 0.0),
        (Driver(100, [1], [(2, 5, 4294967295)]), OwnGpuUsage([1], 1.0), 0.0),
        (Driver(100, [], []), OwnGpuUsage(), 1.0),
        # In a container the driver reports other ids for our processes; they are no game.
        (Driver(100, [77], [(77, 5, 100)]), OwnGpuUsage([1], 1.0), 0.0),
    ],
)
def test_usage_of_other_programs(driver: Driver, own: OwnGpuUsage, share: float) -> None:
    assert GpuMonitor(driver, 0).measure_other_usage(own) == pytest.approx(share)


def test_only_new_samples_are_read() -> None:
    driver = Driver(100, [1], [(2, 7, 60)])
    gpu = GpuMonitor(driver, 0)
    for _ in range(2):
        gpu.measure_other_usage(OwnGpuUsage([1], 1.0))
    assert driver.since == [0, 7]


def test_the_stage_s_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(driver: Driver, index: int = 0, kind: str = "cuda") -> GpuMonitor | None:
        monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
        device = Device(kind=kind, name=CARD, index=index, memory=1)  # type: ignore[arg-type]
        return open_gpu(device)

    assert opened(Driver(), kind="cpu") is None
    assert opened(Driver(begun=False)) is None
    gpu = opened(Driver(names=("NVIDIA T400", CARD)))
    assert gpu is not None
    assert gpu._handle == 1, "CUDA counts the fastest first, the driver by slots"
    gpu = opened(Driver(names=(CARD, CARD)), index=1)
    assert gpu is not None
    assert gpu._handle == 1
    driver = Driver(names=())
    assert opened(driver) is None
    assert driver.ended == 1


def test_a_missing_driver() -> None:
    """Uses the real library. With a card it reports a usage; without one there is no monitor."""
    gpu = open_gpu(Device(kind="cuda", name=CARD, memory=1))
    if gpu is not None:
        assert 0.0 <= gpu.measure_other_usage(gpu_use.OwnGpuUsage()) <= 1.0
        gpu.close()


def test_a_gpu_with_a_display() -> None:
    assert GpuMonitor(Driver(display=1), 0).has_display
    assert not GpuMonitor(Driver(display=0), 0).has_display
    assert not GpuMonitor(Driver(display=None), 0).has_display
