"""A demo that tests share, and what drives real processes."""

import signal
from collections.abc import Iterator

import pytest

from molinkd.cli import local_daemon
from molinkd.peer.home import Home
from tests.support.processes import Process, Tools, wait_for

# Whoever runs the tests in the background may have them ignore Ctrl-C; what they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
