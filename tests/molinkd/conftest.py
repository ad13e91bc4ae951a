"""Fixtures for tests of what runs."""

import pytest


@pytest.fixture(autouse=True)
def short_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints say `molink`, also where it isn't installed beside this Python (as under Wine)."""
    monkeypatch.setattr("molinkd.peer.home.molink_command", lambda: "molink")
