"""The screen of ``molink top``: polls the status, draws views and handles keys."""

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
from molink.swarm.membership.sanitize import quote_name
from molink.wire.messages.admin import (
    DrainRequest,
    PairingDecisionReply,
    PairingDecisionRequest,
    Rebalance,
)
from molink.wire.messages.control_plane import ControlMessage
from molinkd.cli.plain_table import wrap_text
from molinkd.cli.top.layout import SORT_ORDERS, body_lines, header_lines
from molinkd.cli.top.status_feed import StatusFeed
from molinkd.cli.top.view import SwarmView, make_view
from molinkd.cli.translation import tr
from molinkd.cli.units import format_duration

#: Poll interval, in seconds.
POLL_INTERVAL_S = 1.0

#: Fetches the status and whether it is a demo's; raises ``MolinkError``.
FetchStatus = Callable[[], Awaitable[tuple[SwarmStatus, bool]]]
#: Sends a request to the daemon here; raises ``MolinkError``.
SendRequest = Callable[[ControlMessage], Awaitable[ControlMessage]]
#: Requests that keys can send.
UserAction = PairingDecisionRequest | DrainRequest | Rebalance

#: How long the outcome of a command is shown, in seconds.
_NOTICE_S = 8.0


def _help_text() -> str:
    return tr(
        """\
Keys
  ?  h         this help; any key closes it
  q  Ctrl-C    quit; the swarm keeps running
  p  Space     pause or continue
  s            order of requests: oldest, fastest, longest first
  a            approve or reject a PC that waits to join
  d            drain this PC, or resume it
  r            reassign all layers across the connected PCs
  up down PgUp PgDn Home End    scroll

Ring
  weights+KV/all  memory of weights, memory reserved for KV, and
                  all memory that molink may use
  busy       share of the time in which the stage computes
  bubble     share of the time with requests in which it idles
  step       a decode step of one row, measured at the start
  wait+sent  bytes of a channel that are queued and in flight

KV: memory in use and reserved. K: micro-batches in flight.
queues: requests in each queue of the policy. swapped: requests in
host memory, and its used and total blocks. Prompt and answer are
in tokens."""
    )


class HelpScreen(ModalScreen[None]):
    """Explains keys and columns."""

    CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > Static {
        width: 68; max-width: 100%; height: auto; max-height: 100%; border: ascii;
    }
    """

    def compose(self) -> ComposeResult:
        yield Static(Text(_help_text()))

    def on_key(self) -> None:
        """Close on any key."""
        self.dismiss()


class ApprovalScreen(ModalScreen[PairingDecisionRequest | None]):
    """Asks for the code of a waiting PC; the user types it to compare it."""

    CSS = """
    ApprovalScreen { align: center middle; }
    ApprovalScreen > VerticalScroll { width: 60; max-width: 100%; height: 6; border: ascii; }
    ApprovalScreen Input { border: none; height: 1; padding: 0; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", priority=True),
        Binding("ctrl+r", "refuse", priority=True),
    ]

    def compose(self) -> ComposeResult:
        text = tr(
            "Type the code that the new PC shows.\nEnter approves, Ctrl-R rejects, Esc cancels."
        )
        with VerticalScroll(can_focus=False):
            yield Static(Text(text))
            yield Input(max_length=64)

    def on_input_submitted(self) -> None:
        """Approve the PC."""
        self._dismiss_decided(refuse=False)

    def action_refuse(self) -> None:
        """Reject the PC."""
        self._dismiss_decided(refuse=True)

    def action_close(self) -> None:
        """Cancel."""
        self.dismiss(None)

    def _dismiss_decided(self, *, refuse: bool) -> None:
        code = self.query_one(Input).value.strip()
        if code:
            self.dismiss(PairingDecisionRequest(ref=0, code=code, refuse=refuse))


class ChoiceScreen(ModalScreen[DrainRequest | Rebalance | None]):
    """Offers actions by key; any other key cancels."""

    CSS = """
    ChoiceScreen { align: center middle; }
    ChoiceScreen > Static { width: 60; max-width: 100%; height: auto; border: ascii; }
    """

    def __init__(self, text: str, actions: dict[str, DrainRequest | Rebalance]) -> None:
        super().__init__()
        self._text, self._actions = text, actions

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._text}\n{tr('Any other key cancels.')}"))

    def on_key(self, event: Key) -> None:
        """Close on any key."""
        event.stop()
        self.dismiss(self._actions.get(event.key))


def _drain_screen() -> ChoiceScreen:
    text = tr(
        "d  drain: move this PC's layers to other PCs\nr  resume: let this PC hold layers again"
    )
    return ChoiceScreen(text, {key: DrainRequest(ref=0, drain=key == "d") for key in "dr"})


def _rebalance_screen() -> ChoiceScreen:
    text = tr("y  reassign all layers across the connected PCs;\n   running answers continue")
    return ChoiceScreen(text, {"y": Rebalance(ref=0)})


class TopApp(App[None]):
    """A live view of the swarm."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: 2; }
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
        clock: Callable[[], float] = time.monotonic,
        interval: float = POLL_INTERVAL_S,
    ) -> None:
        """``fetch_status`` is called every ``interval`` seconds; ``clock`` is in seconds.

        ``send_request`` sends the user's actions.
        """
        super().__init__(ansi_color=True)
        self._fetch_status, self._send_request, self._clock, self._interval = (
            fetch_status,
            send_request,
            clock,
            interval,
        )
        #: ``None`` until the first status arrives.
        self._view: SwarmView | None = None
        self._sort_order = SORT_ORDERS[0]
        self._paused = False
        #: Error of the last poll, and since when; empty if it succeeded.
        self._failure, self._failed_since = "", 0.0
        #: Outcome of the last action, and when.
        self._notice, self._notice_at = "", 0.0
        self._panes = {name: Static(id=name) for name in ("header", "all", "keys")}
        self._drawn: dict[str, list[Text]] = {}

    def compose(self) -> ComposeResult:
        yield self._panes["header"]
        with VerticalScroll(id="body"):
            yield self._panes["all"]
        yield self._panes["keys"]

    def on_mount(self) -> None:
        """Start polling."""
        self.query_one("#body").focus()
        self.run_worker(self._poll_status(), exit_on_error=True)

    def on_resize(self, _event: Resize) -> None:
        """Redraw for the new size."""
        self.draw_view()

    async def _poll_status(self) -> None:
        while True:
            if not self._paused:
                await self.refresh_status()
            await asyncio.sleep(self._interval)

    async def refresh_status(self) -> None:
        """Fetch and draw the status; on failure keep the last one and show the error."""
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
        """Draw the current state."""
        width = self.size.width
        header = [Text("molink top", "bold"), Text()]
        body: list[Text] = []
        if self._view is None:
            header[1] = Text(tr("waiting for molink on this PC ..."))
        else:
            header = header_lines(self._view, width, stale=bool(self._failure))
            # One column is for the scroll bar.
            body = body_lines(self._view, width - 1, self._sort_order)
        if self._failure:
            elapsed = format_duration(self._clock() - self._failed_since)
            text = tr("NO RESPONSE for {time}", time=elapsed)
            if self._view is not None:
                text += tr("; showing the last status")
            header[1] = Text(text, "bold red")
            why = [Text(line, "red") for line in wrap_text(sanitize_text(self._failure), width - 2)]
            body = [*why, Text(), *body]
        elif self._paused:
            header[1] = Text(tr("PAUSED; press p to continue"), "bold yellow")
        for line in (*header, *body):
            line.truncate(width, overflow="crop")
        self._update_pane("header", header)
        self._update_pane("all", body)
        notice = self._notice if self._clock() - self._notice_at < _NOTICE_S else ""
        keys = tr(
            "? help  q quit  p pause  s sort  a approve  d drain  r rebalance  up/down scroll"
        )
        self._update_pane("keys", [Text(notice or keys, "bold", overflow="crop", no_wrap=True)])

    def _update_pane(self, where: str, lines: list[Text]) -> None:
        """Update only what changed, so that an idle swarm costs nothing."""
        if self._drawn.get(where) != lines:
            self._drawn[where] = lines
            self._panes[where].update(Text("\n").join(lines))

    def action_pause(self) -> None:
        """Pause or continue."""
        self._paused = not self._paused
        self.draw_view()

    def action_sort(self) -> None:
        """Cycle the order of requests."""
        self._sort_order = SORT_ORDERS[(SORT_ORDERS.index(self._sort_order) + 1) % len(SORT_ORDERS)]
        self.draw_view()

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(HelpScreen())

    def action_approve(self) -> None:
        """Ask for a pairing code."""
        self.push_screen(ApprovalScreen(), self._on_choice)

    def action_drain(self) -> None:
        """Offer to drain or resume this PC."""
        self.push_screen(_drain_screen(), self._on_choice)

    def action_rebalance(self) -> None:
        """Offer to reassign all layers."""
        self.push_screen(_rebalance_screen(), self._on_choice)

    def _on_choice(self, message: UserAction | None) -> None:
        if message is not None:
            self.run_worker(self._send_action(message), exit_on_error=True)

    async def _send_action(self, message: UserAction) -> None:
        """Send an action and show its outcome."""
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
        return tr("Reassigning all layers; see the events below.")
    if isinstance(message, DrainRequest):
        if message.drain:
            return tr("Draining this PC; its layers move as soon as other PCs can take them.")
        return tr("This PC can hold layers again.")
    name = tr("The PC")
    if isinstance(reply, PairingDecisionReply):
        name = quote_name(reply.name)
    return tr("{pc} was rejected.", pc=name) if message.refuse else tr("{pc} joined.", pc=name)


async def run_top(home: Path | None) -> None:
    """Run the screen for the daemon of ``home``."""
    feed = StatusFeed(home)
    try:
        await TopApp(feed.fetch_status, feed.send_request).run_async()
    finally:
        await feed.close()
        feed.destroy_context()
