"""A demo that tests share, and helpers for real processes."""

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from molinkd.cli import daemon_client as local_daemon
from molinkd.peer.home import Home
from tests.conftest import SHARING_DEMO
from tests.support.processes import Process, Tools, wait_for

HERE = Path(__file__).parent

# Tests that run in the background may ignore Ctrl-C, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


#: The running demo, if any.
_DEMO = pytest.StashKey[Process]()
#: The files with tests that share it.
_SHARING = pytest.StashKey[set[Path]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Real processes take their time where other tests use the processor too.

    Files that share a demo come one after the other: it needn't run for longer.
    """
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
    sharing = config.stash[_SHARING] = {
        item.path for item in items if "demo" in getattr(item, "fixturenames", ())
    }
    named = {config.rootpath / name for name in SHARING_DEMO}
    assert sharing <= named, f"tests/conftest.py has to name {sharing - named} in SHARING_DEMO"
    first = next((n for n, item in enumerate(items) if item.path in sharing), 0)
    items[first:] = sorted(items[first:], key=lambda item: item.path not in sharing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """With the last of those tests the demo ends: even idle its ten processes want some CPU."""
    yield
    sharing = item.config.stash[_SHARING]
    if item.path in sharing and (nextitem is None or nextitem.path not in sharing):
        demo = item.config.stash.get(_DEMO, None)
        if demo is not None:
            demo.stop()


@pytest.fixture(scope="session")
def tools() -> Iterator[type[Tools]]:
    """Processes and helpers."""
    yield Tools
    Tools.close_clients()


@pytest.fixture(scope="session")
def demo(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Process]:
    """A running ``molink demo`` with three peers, in fp32, shared by all tests that use it."""
    home = tmp_path_factory.mktemp("demo")
    process = Process(home, ["demo", "--dtype", "f32"])
    request.config.stash[_DEMO] = process
    try:
        wait_for(lambda: local_daemon.find_daemon(Home(home)), process)
        yield process
    finally:
        process.stop()
