"""A disk with room: on a nearly full one molink keeps no replicas."""

import shutil
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(total=10**12, used=0, free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
