"""A demo that tests share, and what drives real processes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from molinkd.cli import local_daemon
from molinkd.peer.home import Home
from tests.support.processes import Process, Tools, wait_for

HERE = Path(__file__).parent

# Whoever runs the tests in the background may have them ignore Ctrl-C; what they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes take their time where other tests use the processor too."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    """Processes and helpers."""
    return Tools


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A running ``molink demo`` with three peers, in fp32, shared by the tests of a session.

    With spare workers, as it is; some tests end workers.
    """
    home = tmp_path_factory.mktemp("demo")
    process = Process(home, ["demo", "--dtype", "f32"], variables={"MOLINK_SPARE_WORKER": "true"})
    try:
        wait_for(lambda: local_daemon.find_daemon(Home(home)), process)
        yield process
    finally:
        process.stop()
