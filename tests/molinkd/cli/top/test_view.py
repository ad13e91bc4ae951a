"""The view of a status, without a screen."""

from typing import Any

import pytest
from rich.cells import cell_len

from molink.errors import WireError
from molink.swarm.controller.status_schema import decode_status
from molinkd.cli.top.layout import MIN_WIDTH, SORT_ORDERS, body_lines, header_lines, screen_lines
from molinkd.cli.top.view import SwarmView, make_view
from molinkd.cli.units import format_bandwidth, format_duration, format_seconds, format_size
from tests.molinkd.cli.top import swarms
from tests.molinkd.cli.top.test_screen import SWARMS


def view_of(status: dict[str, Any]) -> SwarmView:
    return make_view(swarms.decode(status))


def test_a_ring() -> None:
    view = view_of(swarms.serving())
    assert (view.swarm, view.model, view.ready, view.online, view.offline) == (
        "home",
        "qwen3-8b",
        True,
        4,
        1,
    )
    (ring,) = view.rings
    assert (ring.running, ring.waiting, ring.kv_used, ring.micro_batches) == (2, 1, 45_000_000, 3)
    assert ring.kv_reserved == 3 * 10**9
    assert ring.tokens_per_s == 21.4
    first = ring.stages[0]
    assert (first.pc, first.layers, first.device) == ("alice", "1-8", "cuda 0: RTX 3060")
    assert (first.weights, first.kv, first.memory) == (3 * 10**9, 10**9, 12 * 10**9)
    assert (first.busy, first.bubbles) == (34, 12)
    assert [stage.link.target for stage in ring.stages if stage.link] == ["bob", "carol", "alice"]
    assert [(one.pc, one.phase) for one in ring.requests] == [
        ("alice", "decode"),
        ("bob", "prefill 10 %"),
        ("alice", "waiting"),
    ]
    assert [(pc.name, pc.state) for pc in view.others] == [
        ("laptop", "online"),
        ("attic", "offline"),
    ]
    assert [(event.age_s, event.text) for event in view.events] == [
        (7.5, "layers of m moved: alice 1-8, bob 9-16"),
        (20.0, "attic is offline"),
    ]


def test_a_stage_on_an_offline_pc() -> None:
    status = swarms.serving()
    status["peers"][1] |= {"state": "offline", "workers": []}
    (ring,) = view_of(status).rings
    assert [stage.doing for stage in ring.stages] == ["", "offline", ""]
    assert ring.stages[1].busy is None
    del status["peers"][1]
    (ring,) = view_of(status).rings
    assert ring.stages[1].pc == f"{1:016x}"


def test_several_models() -> None:
    view = view_of(swarms.several())
    assert (view.model, view.ready) == ("qwen3-8b, llama-3b", True)
    assert [ring.model for ring in view.rings] == ["qwen3-8b", "llama-3b", "llama-3b"]
    assert view.notices == ("Pipeline p3 of llama-3b is not ready: no peer offers to run layers",)
    status = swarms.several()
    status["pipelines"][1]["ready"] = False
    assert not view_of(status).ready
    status = swarms.several()
    status["models"][0]["stopped"] = True
    assert view_of(status).model == "qwen3-8b (stopped), llama-3b"


def test_without_a_coordinator() -> None:
    """Without a coordinator a PC knows only itself, and no stages of the ring."""
    status = swarms.serving()
    pipeline = {"id": "p1", "epoch": 3, "ready": True, "stages": [], "reason": ""}
    status |= {
        "coordinator": {"state": "unreachable"},
        "trouble": "the coordinator doesn't answer",
        "peers": status["peers"][:1],
        "pipelines": [pipeline],
        "events": [],
        "clock": None,
    }
    view = view_of(status)
    assert (
        view.notices[0]
        == "Coordinator unavailable; local information only: the coordinator doesn't answer"
    )
    assert [(pc.name, pc.stages) for pc in view.others] == [("alice", "1-8 ready")]


def test_an_older_daemon() -> None:
    """It reports no loads, schedulers or transfers."""
    status = swarms.serving()
    for peer in status["peers"]:
        peer.pop("transfers", None)
        for worker in peer["workers"]:
            del worker["load"]
    del status["pipelines"][0]["scheduler"], status["clock"]
    view = view_of(status)
    assert [stage.busy for stage in view.rings[0].stages] == [None] * 3
    assert view.transfers == ()
    assert view.events[0].age_s is None
    assert body_lines(view, 80)


def test_an_invalid_status() -> None:
    head = b'{"pipelines": [{"id": "p", "scheduler": {"blocks": %s}}]}'
    for text in (
        b"",
        b"[]",
        b'{"peers": 3}',
        b'{"peers": [{"id": 1}]}',
        b'{"clock": NaN}',
        b'{"clock": 1e300}',
        head % b"-1",
        head % (b"9" * 400),
    ):
        with pytest.raises(WireError, match="can't read"):
            decode_status(text)


def test_transfers() -> None:
    status = swarms.loading()
    status["peers"][1]["transfers"] = [{"bytes": 5, "total": 10, "copy": True}]
    weights, copy = view_of(status).transfers
    assert (weights.pc, weights.what) == ("alice", "weights from bob")
    assert (weights.done, weights.total) == (34 * 10**7, 10**9)
    assert (weights.rate, weights.left_s) == (1e7, 66)
    assert (copy.what, copy.rate, copy.left_s) == ("copy", 0, None)


@pytest.mark.parametrize("width", [1, 20, 40, MIN_WIDTH, 119, 300])
@pytest.mark.parametrize("swarm", SWARMS, ids=lambda swarm: swarm.__name__)
def test_no_line_is_wider_than_the_screen(swarm: Any, width: int) -> None:
    view = view_of(swarm())
    for order in SORT_ORDERS:
        for line in screen_lines(view, width, order):
            assert cell_len(line.plain) <= width
            assert line.plain.isprintable()


def test_usual_numbers_are_not_truncated() -> None:
    status = swarms.ring(["alice", "bob"])
    for one in status["peers"]:
        one["memory"] = 12_600_000_000
        one["workers"][0]["load"] |= {"weights": 69_300_000, "kv": 260_000_000}
    lines = [line.plain for line in screen_lines(view_of(status), MIN_WIDTH)]
    assert sum("0.1+0.3/12.6 GB" in line and line.endswith(" 2.1 ms") for line in lines) == 2


def test_optional_scheduler_state_is_shown() -> None:
    status = swarms.ring(["alice", "bob"])
    assert not any("queues" in line or "swapped" in line for line in shown(status, 120))
    head = status["pipelines"][0]["scheduler"]
    head |= {"queues": [2, 0, 1], "swapped": 1, "host_blocks": 40}
    assert "queues 2 0 1   swapped 1, 0/40" in shown(status, MIN_WIDTH)
    head |= {"swap_fallbacks": 7, "host_used": 40, "queues": [64] * 16}
    lines = shown(status, MIN_WIDTH)
    assert "queues " + " ".join(["64"] * 16) in lines
    assert "swapped 1, 40/40, 7 recomputed" in lines


def test_each_pipeline_has_its_own_figures() -> None:
    status = swarms.several()
    status["pipelines"][1]["scheduler"] |= {"running": 5, "used": 700, "queues": [0, 3]}
    lines = shown(status, MIN_WIDTH)
    first, second = (lines.index(f"{name}") + 1 for name in ("qwen3-8b, p1", "llama-3b, p2"))
    assert lines[first] == "2 running, 1 waiting   21.4 tokens/s   KV 0.0/2.0 GB   K 3"
    assert (
        lines[second] == "5 running, 1 waiting   21.4 tokens/s   KV 0.9/1.0 GB   K 3   queues 0 3"
    )
    assert lines[1] == "3 PCs connected   7 running, 2 waiting   42.8 tokens/s"


def shown(status: dict[str, Any], width: int) -> list[str]:
    return [line.plain for line in screen_lines(view_of(status), width)]


def test_hostile_texts_are_shown_verbatim() -> None:
    view = view_of(swarms.hostile())
    text = "\n".join(line.plain for line in screen_lines(view, 300))
    assert "[red]x[/red]\\x1b[2J" in text
    assert not set("\x1b\x07\r\u202e\u200b") & set(text)


def test_many_notices_leave_room() -> None:
    status = swarms.sixteen()
    for peer in status["peers"]:
        peer["reason"] = "left out"
    notices = view_of(status).notices
    assert len(notices) == 5
    assert notices[-1] == "and 12 more notices: see `molink status`"


def test_extreme_numbers() -> None:
    """Any number from a coordinator can be shown."""
    most = 2**53
    status = swarms.loading()
    worker = status["peers"][0]["workers"][0]
    worker |= {"fetching": {"done": 0, "total": most}, "layers": [most, most]}
    queues = {"queued": most, "in_flight": most}
    link = {"latency_s": 1e15, "rate": 1e15, "decode": queues, "bulk": queues}
    worker["load"] = {"busy": most, "bubbles": most, "weights": most, "kv": most, "link": link}
    status["events"] = ["nan x", "inf x", "-inf x", "1e400 x", "x", ""]
    transfer = {"bytes": most, "total": most, "rate": most, "eta_s": most}
    status["peers"][0]["transfers"] = [transfer]
    view = view_of(status)
    assert screen_lines(view, 80)
    worker["state"] = "ready"
    assert screen_lines(view_of(status), 80)


def test_a_wide_reason_is_not_truncated() -> None:
    status = swarms.serving()
    status["files"] = "電" * 100
    text = "".join(line.plain for line in body_lines(view_of(status), 80))
    assert text.count("電") == 100


def test_unlisted_requests_are_counted() -> None:
    status = swarms.serving()
    status["pipelines"][0]["scheduler"]["waiting"] = 41
    assert "   and 40 more" in [line.plain for line in body_lines(view_of(status), 80)]


def test_the_totals_fit_a_narrow_screen() -> None:
    status = swarms.sixteen()
    status["pipelines"][0]["scheduler"] |= {
        "running": 128,
        "waiting": 64,
        "blocks": 9999,
        "used": 9999,
    }
    status["pipelines"][0]["scheduler"]["requests"][0]["tokens_per_s"] = 2345.6
    assert header_lines(view_of(status), MIN_WIDTH)[1].plain.endswith("KV 16.0/16.0 GB  K 3")
    status["pipelines"][0]["scheduler"] |= {"cached": 32}
    assert header_lines(view_of(status), 120)[1].plain.endswith("K 3   cached 32 %")


def test_units() -> None:
    assert [
        format_size(n) for n in (0, 999, 1000, 64_000, 99_960, 999_499, 999_500, 12 * 10**9)
    ] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "64.0 kB",
        "100 kB",
        "999 kB",
        "1.0 MB",
        "12.0 GB",
    ]
    assert max(len(format_size(10.0**n)) for n in range(18)) <= 7
    assert [format_bandwidth(n) for n in (0, 12_500_000, 125_000_000)] == [
        "?",
        "100 Mbit/s",
        "1.0 Gbit/s",
    ]
    assert [format_seconds(s) for s in (0, 0.0003, 0.015, 0.25, 2.1)] == [
        "?",
        "0.3 ms",
        "15.0 ms",
        "250 ms",
        "2.1 s",
    ]
    assert [format_duration(s) for s in (0, 99, 120, 7200, 200_000)] == [
        "0 s",
        "99 s",
        "2 min",
        "2 h",
        "2 d",
    ]
