"""Runs a transfer in a thread, with its progress in one line."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console

from molink.swarm.artifacts.transfer import TransferRate
from molink.wire.messages.peer_reports import TransferState
from molinkd.cli.transfer_line import TransferLine
from molinkd.peer.artifacts.transfers import Progress

#: Poll interval, in seconds.
POLL_INTERVAL_S = 0.5
T = TypeVar("T")


def run_with_progress(
    get: Callable[[], T], model: str, progress: Progress, stop: threading.Event
) -> T:
    """Run ``get()`` in a thread and show its progress in one line."""
    line = TransferLine(Console(stderr=True, highlight=False, soft_wrap=True))
    speed = TransferRate(time.monotonic())
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(get)
        future.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(POLL_INTERVAL_S):
                show_progress(line, model, progress, speed)
        finally:
            stop.set()
            line.clear_line()
        return future.result()


def show_progress(line: TransferLine, model: str, progress: Progress, speed: TransferRate) -> None:
    """Show the progress of a transfer in one line."""
    speed.observe_bytes(progress.done - progress.existing, time.monotonic())
    if not progress.total:
        return
    state = TransferState(
        model=model[:256],
        done=max(0, progress.done),
        total=progress.total,
        rate=round(speed.rate),
        source=progress.source,
    )
    line.show_transfers([state])
