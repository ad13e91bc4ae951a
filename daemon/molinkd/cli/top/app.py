"""The screen of ``molink top``: asks, shows, and takes keys; what is shown others decide."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key, Resize
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from molink.errors import MolinkError
from molink.plaintext import sanitize_text
from molink.swarm.controller.status_schema import SwarmStatus
from molink.wire.messages.admin import (
    DrainRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
)
from molink.wire.messages.control_plane import ControlMessage
from molinkd.cli.top.layout import SORT_ORDERS, body_lines, header_lines, wrap_text
from molinkd.cli.top.status_feed import StatusFeed
from molinkd.cli.top.view import SwarmView, make_view
from molinkd.cli.units import format_duration

#: Seconds between two looks at the swarm.
POLL_INTERVAL_S = 1.0

#: Asks for the status, and whether it is that of a demo; raises ``MolinkError``.
FetchStatus = Callable[[], Awaitable[tuple[SwarmStatus, bool]]]
#: Has the daemon here do what its user wants; raises ``MolinkError``.
SendRequest = Callable[[ControlMessage], Awaitable[ControlMessage]]
#: What keys can have the daemon do.
UserAction = PairingDecisionRequest | DrainRequest | Rebalance

_KEYS_LINE = "? help  q quit  p pause  s sort  a approve  d drain  r re-place  up/down scroll"
#: How long what came of a command is shown, in seconds.
_NOTICE_S = 8.0
_HELP_TEXT = """\
Keys
  ?  h         this help; any key closes it
  q  Ctrl-C    quit; the swarm goes on
  p  Space     pause and go on
  s            order of requests: oldest, fastest, longest first
  a            let a PC in that waits to join, or send it away
  d            have this PC hold no layers, or hold some again
  r            place all models anew over the PCs that are here
  up down PgUp PgDn Home End    scroll

Ring
  memory     weights and KV, of what the device has for molink
  busy       share of the time in which the stage computes
  bubble     share of the time with requests in which it waits
  step       a decode step of one row, as measured at the start
  wait+sent  bytes of a lane that wait, and that are on the way

KV is how many blocks of it are used, of all; K how many micro-
batches are in flight; queues how many requests are in each queue
of a policy that has some; swapped how many are in host memory,
and its blocks that are used. Prompt and answer are in tokens."""


class HelpScreen(ModalScreen[None]):
    """What the keys and the columns are."""

    CSS = """
    Help { align: center middle; }
    Help > Static { width: 68; max-width: 100%; height: auto; max-height: 100%; border: ascii; }
    """

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static(Text(_HELP_TEXT))

    def on_key(self) -> None:
        """Any key closes it."""
        self.dismiss()


class ApprovalScreen(ModalScreen[PairingDecisionRequest | None]):
    """Takes the code of a PC that waits; it has to be typed, so that it is compared."""

    CSS = """
    Approval { align: center middle; }
    Approval > VerticalScroll { width: 60; max-width: 100%; height: 6; border: ascii; }
    Approval Input { border: none; height: 1; padding: 0; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", priority=True),
        Binding("ctrl+r", "refuse", priority=True),
    ]

    def compose(self) -> ComposeResult:
        """What to type, and where."""
        text = (
            "Type the code that the joining PC itself shows.\n"
            "Enter lets it in, Ctrl-R sends it away, Esc does nothing."
        )
        with VerticalScroll(can_focus=False):
            yield Static(Text(text))
            yield Input(max_length=64)

    def on_input_submitted(self) -> None:
        """Let it in."""
        self._dismiss_decided(refuse=False)

    def action_refuse(self) -> None:
        """Send it away."""
        self._dismiss_decided(refuse=True)

    def action_close(self) -> None:
        """Do nothing."""
        self.dismiss(None)

    def _dismiss_decided(self, *, refuse: bool) -> None:
        code = self.query_one(Input).value.strip()
        if code:
            self.dismiss(PairingDecisionRequest(ref=0, code=code, refuse=refuse))


class ChoiceScreen(ModalScreen[DrainRequest | Rebalance | None]):
    """Asks what is meant: a key for each order. Any other key does nothing."""

    CSS = """
    KeyScreen { align: center middle; }
    KeyScreen > Static { width: 60; max-width: 100%; height: auto; border: ascii; }
    """

    def __init__(self, text: str, actions: dict[str, DrainRequest | Rebalance]) -> None:
        super().__init__()
        self._text, self._actions = text, actions

    def compose(self) -> ComposeResult:
        """What there is to choose."""
        yield Static(Text(f"{self._text}\nAny other key does nothing."))

    def on_key(self, event: Key) -> None:
        """Any key ends it."""
        event.stop()
        self.dismiss(self._actions.get(event.key))


def _drain_screen() -> ChoiceScreen:
    text = (
        "d  this PC holds no layers: the others take them\nr  this PC offers to hold layers again"
    )
    return ChoiceScreen(text, {key: DrainRequest(ref=0, drain=key == "d") for key in "dr"})


def _rebalance_screen() -> ChoiceScreen:
    text = (
        "y  place all models anew, as if nothing served them;\n"
        "   answers go on, but layers may move to other PCs"
    )
    return ChoiceScreen(text, {"y": Rebalance(ref=0)})


class TopApp(App[None]):
    """The swarm on one screen."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 2; }
    #body { height: 1fr; scrollbar-size: 1 1; }
    #keys { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "quit", priority=True),
        Binding("p,space", "pause"),
        Binding("s", "sort"),
        Binding("question_mark,h,f1", "help"),
        Binding("a", "approve"),
        Binding("d", "drain"),
        Binding("r", "rebalance"),
    ]

    def __init__(
        self,
        fetch_status: FetchStatus,
        send_request: SendRequest,
        first: SwarmView | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = POLL_INTERVAL_S,
    ) -> None:
        """``fetch_status`` is called every ``interval`` seconds; ``clock`` is in seconds, too.

        ``send_request`` is called for what the user wants of the daemon. ``first`` is shown until
        there is an answer.
        """
        super().__init__(ansi_color=True)
        self._fetch_status, self._send_request, self._clock, self._interval = (
            fetch_status,
            send_request,
            clock,
            interval,
        )
        self._view = first
        self._sort_order = SORT_ORDERS[0]
        self._paused = False
        #: Why there is no answer, and since when; empty while there is one.
        self._failure, self._failed_since = "", 0.0
        #: What came of the last command, and when.
        self._notice, self._notice_at = "", 0.0
        self._panes = {name: Static(id=name) for name in ("head", "all", "keys")}
        self._drawn: dict[str, list[Text]] = {}

    def compose(self) -> ComposeResult:
        """Two lines that stay, what scrolls, and the keys."""
        yield self._panes["head"]
        with VerticalScroll(id="body"):
            yield self._panes["all"]
        yield self._panes["keys"]

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one("#body").focus()
        self.run_worker(self._poll_status(), exit_on_error=True)

    def on_resize(self, _event: Resize) -> None:
        """Lay out anew."""
        self.draw_view()

    async def _poll_status(self) -> None:
        while True:
            if not self._paused:
                await self.refresh_status()
            await asyncio.sleep(self._interval)

    async def refresh_status(self) -> None:
        """Ask, and show what is told; or why nothing is, and what was told last."""
        try:
            status, demo = await self._fetch_status()
        except MolinkError as error:
            if not self._failure:
                self._failed_since = self._clock()
            self._failure = str(error)
        else:
            self._failure = ""
            if not self._paused:
                self._view = make_view(status, demo=demo)
        self.draw_view()

    def draw_view(self) -> None:
        """Show what is known."""
        if self._view is None and not self._failure:
            return
        width = self.size.width
        head = [Text("molink top"), Text()]
        body: list[Text] = []
        if self._view is not None:
            head = header_lines(self._view, width, stale=bool(self._failure))
            # A column is the scroll bar's.
            body = body_lines(self._view, width - 1, self._sort_order)
        if self._failure:
            gone = format_duration(self._clock() - self._failed_since)
            head[1] = Text(f"NO ANSWER for {gone}; these are the last figures", "bold red")
            why = [Text(line, "red") for line in wrap_text(sanitize_text(self._failure), width - 2)]
            body = [*why, Text(), *body]
        elif self._paused:
            head[1] = Text("PAUSED; p goes on", "bold yellow")
        for line in (*head, *body):
            line.truncate(width, overflow="crop")
        self._update_pane("head", head)
        self._update_pane("all", body)
        notice = self._notice if self._clock() - self._notice_at < _NOTICE_S else ""
        self._update_pane(
            "keys", [Text(notice or _KEYS_LINE, "bold", overflow="crop", no_wrap=True)]
        )

    def _update_pane(self, where: str, lines: list[Text]) -> None:
        """Only what is new is drawn: a quiet swarm costs nothing."""
        if self._drawn.get(where) != lines:
            self._drawn[where] = lines
            self._panes[where].update(Text("\n").join(lines))

    def action_pause(self) -> None:
        """Keep what is on the screen, or go on."""
        self._paused = not self._paused
        self.draw_view()

    def action_sort(self) -> None:
        """Show requests in the next order."""
        self._sort_order = SORT_ORDERS[(SORT_ORDERS.index(self._sort_order) + 1) % len(SORT_ORDERS)]
        self.draw_view()

    def action_help(self) -> None:
        """Explain keys and columns."""
        self.push_screen(HelpScreen())

    def action_approve(self) -> None:
        """Ask for the code of a PC that waits, and let it in or send it away."""
        self.push_screen(ApprovalScreen(), self._on_choice)

    def action_drain(self) -> None:
        """Have this PC hold no layers, or some again."""
        self.push_screen(_drain_screen(), self._on_choice)

    def action_rebalance(self) -> None:
        """Have all models placed anew."""
        self.push_screen(_rebalance_screen(), self._on_choice)

    def _on_choice(self, message: UserAction | None) -> None:
        if message is not None:
            self.run_worker(self._send_action(message), exit_on_error=True)

    async def _send_action(self, message: UserAction) -> None:
        """Tell the daemon, and show what came of it."""
        try:
            reply = await self._send_request(message)
        except MolinkError as error:
            text = sanitize_text(str(error))
        else:
            text = _outcome_text(message, reply)
        self._notice, self._notice_at = text, self._clock()
        self.draw_view()


def _outcome_text(message: UserAction, reply: ControlMessage) -> str:
    if isinstance(message, Rebalance):
        return "All models are placed anew; the events below tell what becomes of it."
    if isinstance(message, DrainRequest):
        if message.drain:
            return "The layers of this PC go to the others as soon as these can take them."
        return "This PC offers to hold layers again."
    name = sanitize_text(reply.name) if isinstance(reply, PairingDecisionReply) else "The PC"
    return f"{name} was refused." if message.refuse else f"{name} is a member now."


async def run_top(home: Path | None, first: SwarmView) -> None:
    """Show the swarm of the daemon of ``home``, ``first`` at first, until the user quits."""
    feed = StatusFeed(home)
    try:
        await TopApp(feed.fetch_status, feed.send_request, first).run_async()
    finally:
        await feed.close()
        feed.destroy_context()
