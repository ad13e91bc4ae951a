"""A daemon as a process."""

from pathlib import Path

import pytest

from molink.errors import UsageError
from molinkd.peer import main as module
from molinkd.peer.launch import Launch
from molinkd.peer.settings import Settings


def test_the_descriptor_limit_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class FakeDaemon:
        def __init__(self, *_: object) -> None:
            done.append("daemon")

        async def run(self) -> None:
            raise UsageError("enough")

    monkeypatch.setattr(module, "Daemon", FakeDaemon)
    monkeypatch.setattr(module, "raise_descriptor_limit", lambda: done.append("limit"))
    launch = Launch(home=str(tmp_path), settings=Settings(name="x"), role="up")
    with pytest.raises(UsageError, match="enough"):
        module.run_daemon(launch, lambda _: None)
    assert done == ["limit", "daemon"]
