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
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Static

from molink.errors import MolinkError
from molinkd.cli.top.feed import Feed
from molinkd.cli.top.lines import ORDERS, body_lines, head_lines, wrap
from molinkd.cli.top.status import Status
from molinkd.cli.top.view import View, make_view, plain
from molinkd.cli.units import long_time

#: Seconds between two looks at the swarm.
INTERVAL_S = 1.0

#: Asks for the status, and whether it is that of a demo; raises ``MolinkError``.
Ask = Callable[[], Awaitable[tuple[Status, bool]]]

_KEYS_LINE = "? help   q quit   p pause   s sort   up/down PgUp/PgDn Home/End scroll"
_HELP = """\
Keys
  ?  h         this help; any key closes it
  q  Ctrl-C    quit; the swarm goes on
  p  Space     pause and go on
  s            order of requests: oldest, fastest, longest first
  up down PgUp PgDn Home End    scroll

Ring
  memory     weights and KV, of what the device has for molink
  busy       share of the time in which the stage computes
  bubble     share of the time with requests in which it waits
  step       a decode step of one row, as measured at the start
  wait+sent  bytes of a lane that wait, and that are on the way

KV is how many blocks of it are used, of all; K how many micro-
batches are in flight. Prompt and answer are in tokens, and
tokens/s is since the first one."""


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
    ]

    def __init__(
        self,
        ask: Ask,
        first: View | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = INTERVAL_S,
    ) -> None:
        """``ask`` is called every ``interval`` seconds; ``clock`` is in seconds, too.

        ``first`` is shown until there is an answer.
        """
        super().__init__(ansi_color=True)
        self._ask, self._clock, self._interval = ask, clock, interval
        self._view = first
        self._order = ORDERS[0]
        self._paused = False
        #: Why there is no answer, and since when; empty while there is one.
        self._failure, self._since = "", 0.0
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
        self._put("keys", [Text(_KEYS_LINE, "bold", overflow="crop", no_wrap=True)])

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


async def watch(home: Path | None, first: View) -> None:
    """Show the swarm of the daemon of ``home``, ``first`` at first, until the user quits."""
    feed = Feed(home)
    try:
        await TopApp(feed.ask, first).run_async()
    finally:
        await feed.close()
        feed.end()
