"""The screen as text, compared with files; ``WRITE_FRAMES=1 pytest …`` rewrites them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molink.errors import MolinkError, RequestError, Unavailable
from molink.swarm.controller.status_schema import SwarmStatus
from molink.wire.messages.admin import (
    DrainRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
)
from molink.wire.messages.control_plane import ControlMessage, DoneReply
from molinkd.cli.top.app import TopApp
from tests.molinkd.cli.top import swarms

FRAMES = Path(__file__).parent / "frames"
SIZES = ((80, 24), (120, 40))
SWARMS: tuple[Callable[[], dict[str, Any]], ...] = (
    swarms.serving,
    swarms.loading,
    swarms.not_ready,
    swarms.pairing,
    swarms.alone,
    swarms.several,
    swarms.sixteen,
    swarms.long_names,
    swarms.hostile,
)


class Daemon:
    """Answers with a status or an error."""

    def __init__(self, answer: SwarmStatus | MolinkError) -> None:
        self.answer = answer
        self.received: list[ControlMessage] = []
        self.refusal: MolinkError | None = None
        self.now = 1000.0

    async def ask(self) -> tuple[SwarmStatus, bool]:
        if isinstance(self.answer, MolinkError):
            raise self.answer
        return self.answer, False

    async def tell(self, message: ControlMessage) -> ControlMessage:
        self.received.append(message)
        if self.refusal is not None:
            raise self.refusal
        if isinstance(message, PairingDecisionRequest):
            return PairingDecisionReply(ref=0, name="den\x1b[2J")
        return DoneReply(ref=0)

    def clock(self) -> float:
        return self.now


def screen(app: TopApp) -> str:
    """The terminal's content without colours."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


def compare(name: str, text: str) -> None:
    file = FRAMES / f"{name}.txt"
    if os.environ.get("WRITE_FRAMES"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
    assert text == file.read_text(encoding="utf-8")


def swarm_of(status: dict[str, Any]) -> tuple[Daemon, TopApp]:
    daemon = Daemon(swarms.decode(status))
    return daemon, TopApp(daemon.ask, daemon.tell, daemon.clock, interval=3600.0)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("swarm", SWARMS, ids=lambda swarm: swarm.__name__)
async def test_frames(swarm: Callable[[], dict[str, Any]], size: tuple[int, int]) -> None:
    _, app = swarm_of(swarm())
    async with app.run_test(size=size) as pilot:
        await app.refresh_status()
        await pilot.pause()
        text = screen(app)
    assert not any(ord(c) < 32 for c in text.replace("\n", ""))
    compare(f"{swarm.__name__}-{size[0]}x{size[1]}", text)


async def test_it_scrolls() -> None:
    _, app = swarm_of(swarms.sixteen())
    app.animation_level = "none"
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        await pilot.press("end")
        await pilot.pause()
        compare("sixteen-end-80x24", screen(app))
        await app.refresh_status()
        await pilot.pause()
        assert "layers of m moved" in screen(app), "new content must not scroll back"


async def test_help() -> None:
    _, app = swarm_of(swarms.serving())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        await pilot.press("question_mark")
        await app.refresh_status()
        await pilot.pause()
        compare("help-80x24", screen(app))
        await pilot.press("x")
        await pilot.pause()
        assert "Keys" not in screen(app)


async def test_a_typed_code_approves_a_pc() -> None:
    daemon, app = swarm_of(swarms.pairing())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        await pilot.press("a")
        await pilot.pause()
        compare("approve-80x24", screen(app))
        await pilot.press("enter")
        assert not daemon.received, "nothing was typed"
        await pilot.press(*"4829", "minus", "enter")
        await pilot.pause()
        assert "joined." in screen(app)
        assert "\x1b" not in screen(app)
        daemon.now += 60.0
        await app.refresh_status()
        await pilot.pause()
        assert "? help" in screen(app)
        daemon.refusal = RequestError("no PC that waits shows the code 1")
        await pilot.press("a", "1", "ctrl+r")
        await pilot.pause()
        assert "no PC that waits shows the code 1" in screen(app)
        await pilot.press("a", "2", "escape")
        await pilot.pause()
    assert daemon.received == [
        PairingDecisionRequest(ref=0, code="4829-", refuse=False),
        PairingDecisionRequest(ref=0, code="1", refuse=True),
    ]


async def test_this_pc_is_drained_and_resumed() -> None:
    daemon, app = swarm_of(swarms.serving())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        for keys in ("dx", "dd", "dr"):
            await pilot.press(*keys)
            await pilot.pause()
        assert "can hold layers again" in screen(app)
    assert daemon.received == [DrainRequest(ref=0, drain=True), DrainRequest(ref=0, drain=False)]


async def test_rebalancing_needs_confirmation() -> None:
    daemon, app = swarm_of(swarms.serving())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        for keys in ("rx", "ry"):
            await pilot.press(*keys)
            await pilot.pause()
        assert "Reassigning all layers" in screen(app)
    assert daemon.received == [Rebalance(ref=0)]


async def test_a_pause_freezes_the_view() -> None:
    daemon, app = swarm_of(swarms.serving())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        await pilot.press("p")
        daemon.answer = swarms.decode(swarms.not_ready())
        await app.refresh_status()
        await pilot.pause()
        assert "PAUSED" in screen(app)
        assert "NOT READY" not in screen(app)
        await pilot.press("space")
        await app.refresh_status()
        await pilot.pause()
        assert "NOT READY" in screen(app)


async def test_the_order_of_requests() -> None:
    _, app = swarm_of(swarms.serving())
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        orders = []
        for _ in range(4):
            await pilot.pause()
            lines = screen(app).splitlines()
            first = next(i for i, line in enumerate(lines) if line.startswith("REQUESTS"))
            orders.append((lines[first].split("  ")[0], lines[first + 1].split()[1]))
            await pilot.press("s")
    assert orders == [
        ("REQUESTS, oldest first", "decode"),
        ("REQUESTS, fastest first", "decode"),
        ("REQUESTS, longest first", "prefill"),
        ("REQUESTS, oldest first", "decode"),
    ]


async def test_reconnecting_to_the_daemon() -> None:
    daemon, app = swarm_of(swarms.serving())
    status = daemon.answer
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        daemon.answer = Unavailable(
            "molink is not running [bold]here[/bold]: start one with `molink up`, or\x1b"
        )
        await app.refresh_status()
        daemon.now += 12
        await app.refresh_status()
        await pilot.pause()
        compare("gone-80x24", screen(app))
        daemon.answer = status
        await app.refresh_status()
        await pilot.pause()
        assert "NO ANSWER" not in screen(app)


async def test_it_waits_for_the_first_status() -> None:
    daemon, app = swarm_of(swarms.serving())
    answer = asyncio.Event()

    async def ask() -> tuple[SwarmStatus, bool]:
        await answer.wait()
        return await daemon.ask()

    app = TopApp(ask, daemon.tell, daemon.clock, interval=3600.0)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "waiting for molink on this PC" in screen(app)
        assert "? help" in screen(app)
        answer.set()
        await app.refresh_status()
        await pilot.pause()
        assert "waiting for molink" not in screen(app)


async def test_without_any_status() -> None:
    daemon, app = swarm_of(swarms.serving())
    daemon.answer = Unavailable("the daemon did not respond")
    async with app.run_test(size=(80, 24)) as pilot:
        await app.refresh_status()
        await pilot.pause()
        assert "NO RESPONSE for 0 s\n" in screen(app)
        assert "the daemon did not respond" in screen(app)


async def test_it_quits() -> None:
    for key in ("q", "ctrl+c"):
        _, app = swarm_of(swarms.serving())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press(key)
        assert app.return_code == 0
