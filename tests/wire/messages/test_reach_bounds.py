"""Peers' reports of their links are bounded, since placement computes with them."""

import math
from typing import Any

import msgspec
import pytest

from molink.wire.messages.peer_reports import ReachReport


@pytest.mark.parametrize(
    "extreme",
    [
        {"loss": -0.1},
        {"loss": 1.1},
        {"loss": math.nan},
        {"latency": -1.0},
        {"latency": math.inf},
        {"rate": 0.0},
        {"rate": math.inf},
    ],
    ids=str,
)
def test_link_measurements_are_bounded(extreme: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode(ReachReport(peer="b", is_reachable=True, **extreme))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=ReachReport)


@pytest.mark.parametrize("loss", [0.0, 0.01, 1.0])
def test_shares_are_accepted(loss: float) -> None:
    report = ReachReport(peer="b", is_reachable=True, loss=loss)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ReachReport) == report
