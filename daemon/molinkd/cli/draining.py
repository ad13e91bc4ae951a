"""``molink drain`` and ``molink resume``: this PC gives its layers away for a while."""

import time
from typing import Annotated, Any

import typer

from molink.errors import Unavailable
from molink.plaintext import printable
from molinkd.cli.swarm_verbs import HomeOption

#: How often the swarm is looked at, in seconds.
_LOOK_S = 0.5


def drain(
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the others to take over.")
    ] = 120.0,
    home: HomeOption = None,
) -> None:
    """Hold no layers on this PC: the others take them, and memory is free.

    It lasts until `molink resume`, or until molink is started here again.
    """
    from molinkd.cli import local_daemon
    from molinkd.peer.home import Home

    place, found = Home.find(home), local_daemon.need_daemon(home)
    local_daemon.drain(found, on=True)
    deadline = time.monotonic() + timeout
    trouble = "the others have not taken them yet"
    while True:
        status = local_daemon.fetch_status(found)
        me = _here(status, found.note.pid)
        if me is not None and not me["workers"]:
            ends = f"{place.typed('resume')} ends that."
            print(printable(f"This PC holds no layers now; its endpoint goes on. {ends}"))
            return
        trouble = status.get("trouble") or trouble
        if time.monotonic() >= deadline or _stuck(status, me):
            break
        time.sleep(_LOOK_S)
    raise Unavailable(
        printable(
            f"the layers of this PC stay here for now: {trouble}. They go as soon as others can "
            f"take them; {place.typed('resume')} keeps them here, {place.typed('down')} ends "
            "molink here anyway."
        )
    )


def resume(home: HomeOption = None) -> None:
    """Offer to hold layers on this PC again, after `molink drain`."""
    from molinkd.cli import local_daemon

    local_daemon.drain(local_daemon.need_daemon(home), on=False)
    print("This PC offers to hold layers again.")


def _here(status: dict[str, Any], pid: int) -> dict[str, Any] | None:
    return next((peer for peer in status["peers"] if peer["daemon_pid"] == pid), None)


def _stuck(status: dict[str, Any], me: dict[str, Any] | None) -> bool:
    """Whether the swarm has looked at it, and knows no way."""
    return bool(me is not None and me.get("paused") and status.get("trouble"))
