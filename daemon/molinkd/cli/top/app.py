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
from molink.plaintext import plain
from molink.swarm.controller.told_status import Status
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.requests import DrainRequest, JudgeReply, JudgeRequest, Rebalance
from molinkd.cli.top.feed import StatusFeed
from molinkd.cli.top.lines import ORDERS, body_lines, head_lines, wrap
from molinkd.cli.top.view import View, make_view
from molinkd.cli.units import long_time

#: Seconds between two looks at the swarm.
INTERVAL_S = 1.0

#: Asks for the status, and whether it is that of a demo; raises ``MolinkError``.
Ask = Callable[[], Awaitable[tuple[Status, bool]]]
#: Has the daemon here do what its user wants; raises ``MolinkError``.
Tell = Callable[[ControlMessage], Awaitable[ControlMessage]]
#: What keys can have the daemon do.
Order = JudgeRequest | DrainRequest | Rebalance

_KEYS_LINE = "? help  q quit  p pause  s sort  a approve  d drain  r re-place  up/down scroll"
#: How long what came of a command is shown, in seconds.
_SAID_S = 8.0
_HELP = """\
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


class Help(ModalScreen[None]):
    """What the keys and the columns are."""

    CSS = """
    Help { align: center middle; }
    Help > Static { width: 68; max-width: 100%; height: auto; max-height: 100%; border: ascii; }
    """

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static(Text(_HELP))

    def on_key(self) -> None:
        """Any key closes it."""
        self.dismiss()


class Approval(ModalScreen[JudgeRequest | None]):
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
        self._decide(refuse=False)

    def action_refuse(self) -> None:
        """Send it away."""
        self._decide(refuse=True)

    def action_close(self) -> None:
        """Do nothing."""
        self.dismiss(None)

    def _decide(self, *, refuse: bool) -> None:
        code = self.query_one(Input).value.strip()
        if code:
            self.dismiss(JudgeRequest(ref=0, code=code, refuse=refuse))


class KeyScreen(ModalScreen[DrainRequest | Rebalance | None]):
    """Asks what is meant: a key for each order. Any other key does nothing."""

    CSS = """
    KeyScreen { align: center middle; }
    KeyScreen > Static { width: 60; max-width: 100%; height: auto; border: ascii; }
    """

    def __init__(self, text: str, orders: dict[str, DrainRequest | Rebalance]) -> None:
        super().__init__()
        self._text, self._orders = text, orders

    def compose(self) -> ComposeResult:
        """What there is to choose."""
        yield Static(Text(f"{self._text}\nAny other key does nothing."))

    def on_key(self, event: Key) -> None:
        """Any key ends it."""
        event.stop()
        self.dismiss(self._orders.get(event.key))


def _draining() -> KeyScreen:
    text = (
        "d  this PC holds no layers: the others take them\nr  this PC offers to hold layers again"
    )
    return KeyScreen(text, {key: DrainRequest(ref=0, drain=key == "d") for key in "dr"})


def _rebalancing() -> KeyScreen:
    text = (
        "y  place all models anew, as if nothing served them;\n"
        "   answers go on, but layers may move to other PCs"
    )
    return KeyScreen(text, {"y": Rebalance(ref=0)})


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
        ask: Ask,
        tell: Tell,
        first: View | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = INTERVAL_S,
    ) -> None:
        """``ask`` is called every ``interval`` seconds; ``clock`` is in seconds, too.

        ``tell`` is called for what the user wants of the daemon. ``first`` is shown until there is
        an answer.
        """
        super().__init__(ansi_color=True)
        self._ask, self._tell, self._clock, self._interval = ask, tell, clock, interval
        self._view = first
        self._order = ORDERS[0]
        self._paused = False
        #: Why there is no answer, and since when; empty while there is one.
        self._failure, self._since = "", 0.0
        #: What came of the last command, and when.
        self._said, self._said_at = "", 0.0
        self._parts = {name: Static(id=name) for name in ("head", "all", "keys")}
        self._shown: dict[str, list[Text]] = {}

    def compose(self) -> ComposeResult:
        """Two lines that stay, what scrolls, and the keys."""
        yield self._parts["head"]
        with VerticalScroll(id="body"):
            yield self._parts["all"]
        yield self._parts["keys"]

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one("#body").focus()
        self.run_worker(self._watch(), exit_on_error=True)

    def on_resize(self, _event: Resize) -> None:
        """Lay out anew."""
        self.show()

    async def _watch(self) -> None:
        while True:
            if not self._paused:
                await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Ask, and show what is told; or why nothing is, and what was told last."""
        try:
            status, demo = await self._ask()
        except MolinkError as error:
            if not self._failure:
                self._since = self._clock()
            self._failure = str(error)
        else:
            self._failure = ""
            if not self._paused:
                self._view = make_view(status, demo=demo)
        self.show()

    def show(self) -> None:
        """Show what is known."""
        if self._view is None and not self._failure:
            return
        width = self.size.width
        head = [Text("molink top"), Text()]
        body: list[Text] = []
        if self._view is not None:
            head = head_lines(self._view, width, stale=bool(self._failure))
            # A column is the scroll bar's.
            body = body_lines(self._view, width - 1, self._order)
        if self._failure:
            gone = long_time(self._clock() - self._since)
            head[1] = Text(f"NO ANSWER for {gone}; these are the last figures", "bold red")
            why = [Text(line, "red") for line in wrap(plain(self._failure), width - 2)]
            body = [*why, Text(), *body]
        elif self._paused:
            head[1] = Text("PAUSED; p goes on", "bold yellow")
        for line in (*head, *body):
            line.truncate(width, overflow="crop")
        self._put("head", head)
        self._put("all", body)
        said = self._said if self._clock() - self._said_at < _SAID_S else ""
        self._put("keys", [Text(said or _KEYS_LINE, "bold", overflow="crop", no_wrap=True)])

    def _put(self, where: str, lines: list[Text]) -> None:
        """Only what is new is drawn: a quiet swarm costs nothing."""
        if self._shown.get(where) != lines:
            self._shown[where] = lines
            self._parts[where].update(Text("\n").join(lines))

    def action_pause(self) -> None:
        """Keep what is on the screen, or go on."""
        self._paused = not self._paused
        self.show()

    def action_sort(self) -> None:
        """Show requests in the next order."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.show()

    def action_help(self) -> None:
        """Explain keys and columns."""
        self.push_screen(Help())

    def action_approve(self) -> None:
        """Ask for the code of a PC that waits, and let it in or send it away."""
        self.push_screen(Approval(), self._ordered)

    def action_drain(self) -> None:
        """Have this PC hold no layers, or some again."""
        self.push_screen(_draining(), self._ordered)

    def action_rebalance(self) -> None:
        """Have all models placed anew."""
        self.push_screen(_rebalancing(), self._ordered)

    def _ordered(self, message: Order | None) -> None:
        if message is not None:
            self.run_worker(self._carry_out(message), exit_on_error=True)

    async def _carry_out(self, message: Order) -> None:
        """Tell the daemon, and show what came of it."""
        try:
            reply = await self._tell(message)
        except MolinkError as error:
            text = plain(str(error))
        else:
            text = _outcome(message, reply)
        self._said, self._said_at = text, self._clock()
        self.show()


def _outcome(message: Order, reply: ControlMessage) -> str:
    if isinstance(message, Rebalance):
        return "All models are placed anew; the events below tell what becomes of it."
    if isinstance(message, DrainRequest):
        if message.drain:
            return "The layers of this PC go to the others as soon as these can take them."
        return "This PC offers to hold layers again."
    name = plain(reply.name) if isinstance(reply, JudgeReply) else "The PC"
    return f"{name} was refused." if message.refuse else f"{name} is a member now."


async def watch(home: Path | None, first: View) -> None:
    """Show the swarm of the daemon of ``home``, ``first`` at first, until the user quits."""
    feed = StatusFeed(home)
    try:
        await TopApp(feed.ask, feed.tell, first).run_async()
    finally:
        await feed.close()
        feed.end()
