"""Fixtures that every test may use."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from molink.wire.sockets.event_loop import EventLoop
from molinkd.imports import permanent_imports
from tests.support.models import MakeModel
from tests.support.net import Net
from tools.release import build_wheel, copy_source, read_epoch

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

# Tests share the machine with each other and with processes that they start: further
# threads would only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# GPU kernels run in Triton's interpreter where there is no GPU; Triton reads it on import.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Hints name `molink` instead of its path, as in a terminal with an active .venv.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

# Tests expect English.
os.environ["LANGUAGE"] = "en"

# Otherwise each process that a test starts would compile all of molink's modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The time that examples take depends on the machine's load.
settings.register_profile(
    "molink", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("molink")

#: Tests that start processes, by folder or file.
STARTING_PROCESSES = (
    "tests/chaos/",
    "tests/e2e/",
    "tests/molinkd/coordinator/test_main.py",
    "tests/molinkd/peer/election/test_coordinator_process.py",
    "tests/molinkd/peer/agent/test_device_probe.py",
    "tests/molinkd/peer/agent/test_stage_bench.py",
    "tests/molinkd/peer/agent/test_worker_supervisor.py",
    "tests/molinkd/worker/test_processes.py",
    "tests/stage/linear/test_bnb.py",
    "tests/stage/test_without_avx512.py",
    "tests/test_cpu_isa.py",
    "tests/test_repository.py",
    "tests/tools/test_release.py",
    "tests/tools/test_wan.py",
)

#: Files whose tests are independent of each other, and may run on several workers.
SPREAD = (
    "tests/dst/test_seeds.py",
    "tests/dst/test_teeth.py",
    "tests/stage/gpu_kernels/test_compiled_kernels.py",
)

#: Files whose tests share a demo.
SHARING_DEMO = (
    "tests/e2e/test_demo.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_hostile_swarm.py",
    "tests/e2e/test_official_clients.py",
    "tests/e2e/test_parity.py",
)
#: Number of workers that run files which start processes, if there are more than two workers.
STARTING_WORKERS = 2

#: Fixtures that several folders share.
pytest_plugins = ["tests.support.fake_fleet"]


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than two processors: while processes wait for each other, another can run."""
    return 3 if os.cpu_count() == 2 else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "Scheduling | None":
    """With ``--dist loadfile``, few tests that start processes run at once, and from the start."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class ByFile(LoadScopeScheduling):
        """A file's tests stay on one worker, and so its fixtures are made once."""

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SPREAD):
                return nodeid
            if nodeid.startswith(SHARING_DEMO):
                return SHARING_DEMO[0]
            return nodeid.partition("::")[0]

        def _assign_work_unit(self, node: WorkerController) -> None:
            starting = STARTING_WORKERS if len(self.nodes) > STARTING_WORKERS else 1
            starts = node in self.nodes[:starting]
            # The longest tests start first, so that no worker is left with one at the end.
            for scope in sorted(self.workqueue, key=lambda scope: not scope.startswith(SPREAD)):
                if scope.startswith(STARTING_PROCESSES) == starts:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze objects imported for the tests: they are no garbage, and scanning them takes long."""
    with permanent_imports():
        return (yield)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that ZeroMQ needs; pytest-asyncio's own choice on Windows is a Proactor loop."""
    return {"selector": EventLoop}


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all processes of a parallel run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make random small models: ``make_model(folder, family, seed, **config_fields) -> folder``.

    ``family`` is a ``model_type`` that molink supports. The folder has weights, configs, a
    byte-level ``tokenizer.json`` (259 ids) and a ChatML template.
    """
    return MakeModel(shared_folder(tmp_path_factory) / "models")


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    """Sockets for a test; fails if one of its tasks outlives it."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        made = Net(stack)
        yield made
    made.authenticator.close()
    made.context.destroy(linger=0)  # a test that failed has sockets open: don't wait for them
    current = asyncio.current_task()
    assert asyncio.all_tasks() <= {*before, current}


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, as a release has it."""
    made, epoch = shared_folder(tmp_path_factory) / "wheel", read_epoch()
    if not made.exists():
        folder = tmp_path_factory.mktemp("wheel")
        source = copy_source(folder / "source", epoch)
        build_wheel(source, folder / "built", epoch)
        with contextlib.suppress(OSError):  # another process has built it meanwhile
            (folder / "built").rename(made)
    (wheel,) = made.glob("*.whl")
    return wheel
