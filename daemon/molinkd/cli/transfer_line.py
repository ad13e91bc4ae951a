"""Progress of transfers in the terminal."""

import time
from collections.abc import Callable, Sequence

from rich.cells import chop_cells
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from molink.plaintext import printable
from molink.swarm.artifacts.transfer import estimate_eta
from molink.wire.messages.peer_reports import TransferState
from molinkd.cli.translation import tr
from molinkd.cli.units import format_duration

#: Interval of progress lines where lines can't be rewritten, in seconds.
PRINT_INTERVAL_S = 5.0
_ERASE_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def transfer_text(one: TransferState) -> str:
    """Format the progress of a transfer: bytes, rate and remaining time."""
    model = one.model
    if one.source:
        model = tr("{model} from {source}", model=model, source=one.source)
    done, total = f"{one.done / 1e6:.0f}", f"{one.total / 1e6:.0f}"
    text = tr("{model}: {done} of {total} MB", model=model, done=done, total=total)
    seconds = estimate_eta(one.total - one.done, one.rate)
    if seconds is None:
        return text
    left = tr("{time} left", time=format_duration(seconds))
    return f"{text}, {one.rate / 1e6:.1f} MB/s, {left}"


class TransferLine:
    """Shows transfer progress: one rewritten line on a terminal, else lines at intervals."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._is_drawn = False
        self._printed_at = float("-inf")

    def show_transfers(self, transfers: Sequence[TransferState]) -> None:
        """Show the progress of ``transfers``; nothing if empty."""
        self.clear_line()
        waited_for = [one for one in transfers if not one.is_replica]
        if not waited_for:
            return
        transfers_text = "; ".join(map(transfer_text, waited_for))
        text = printable(tr("Fetching {transfers}", transfers=transfers_text))
        if self._console.is_terminal:
            first = chop_cells(text, self._console.width - 1)[0]
            self._console.print(first, end="", markup=False)
            self._is_drawn = True
        elif self._clock() - self._printed_at >= PRINT_INTERVAL_S:
            self._console.print(text, markup=False)
            self._printed_at = self._clock()

    def clear_line(self) -> None:
        """Erase the progress line before other output."""
        if self._is_drawn:
            self._console.control(_ERASE_LINE)
            self._is_drawn = False
