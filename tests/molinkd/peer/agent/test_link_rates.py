import asyncio

import pytest

from molink.wire.messages.peer_reports import MAX_RATE
from molinkd.peer.agent import link_rates as module
from molinkd.peer.agent.link_rates import LinkRateReporter


def test_changed_rates_are_reported() -> None:
    rates: dict[str, float] = {}
    reported: list[tuple[str, float]] = []
    watched = LinkRateReporter(lambda: rates, lambda *said: reported.append(said))
    watched.report_changes()
    for rate in (0.0, 1e6, 1.2e6, 1.6e6, 1.3e6, 2 * MAX_RATE, float("nan"), 1e6):
        rates["b"] = rate
        watched.report_changes()
    assert reported == [("b", 1e6), ("b", 1.6e6), ("b", 1e6)]
    reported.clear()
    rates.clear()
    watched.report_all()
    assert reported == [("b", 1e6)]
    watched.drop_peer("b")
    watched.report_all()
    assert reported == [("b", 1e6)]


async def test_polling_stops_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.001)
    reported: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    watched = LinkRateReporter(lambda: {"b": 1e6}, lambda *said: reported.put_nowait(said))
    watched.start()
    assert await asyncio.wait_for(reported.get(), 30) == ("b", 1e6)
    await watched.close()
