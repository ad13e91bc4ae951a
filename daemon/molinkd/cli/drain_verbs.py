"""``molink drain``, ``resume`` and ``rebalance``: move layers between PCs."""

import sys
import time
from typing import Annotated, Any

import typer

from molink.errors import Unavailable
from molink.plaintext import printable
from molinkd.cli.swarm_verbs import HomeOption

DeviceOption = Annotated[
    str | None, typer.Option(help="One device of this PC, such as cuda:1.  [default: all]")
]

#: Poll interval, in seconds.
_POLL_INTERVAL_S = 0.5
#: Seconds after which ``drain`` says what it waits for.
_TELL_AFTER_S = 2.0


def drain(
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for other PCs to take over.")
    ] = 120.0,
    device: DeviceOption = None,
    home: HomeOption = None,
) -> None:
    """Move this PC's layers to other PCs and free its memory.

    Lasts until `molink resume`, or until molink restarts.
    """
    from molinkd.cli import daemon_client
    from molinkd.peer.home import Home

    place, found = Home.find_home(home), daemon_client.require_daemon(home)
    daemon_client.set_drain(found, device or "", on=True)
    began = time.monotonic()
    deadline, is_told = began + timeout, False
    trouble = "other PCs have not taken over yet"
    while True:
        status = daemon_client.fetch_status(found)
        own = _own_peers(status, found.run_file.pid, device)
        if own and not any(one["workers"] for one in own):
            what = f"{device} of this PC" if device else "This PC"
            ends = f"Undo: {place.format_command('resume')}."
            print(printable(f"{what} holds no layers now; its endpoint still works. {ends}"))
            return
        trouble = status.get("trouble") or trouble
        now = time.monotonic()
        if now >= deadline or _is_stuck(status, own):
            break
        if not is_told and now - began >= _TELL_AFTER_S:
            is_told = True
            print(
                "Other PCs load the layers; running answers continue here until then. Ctrl-C stops "
                "waiting, not the move …",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_POLL_INTERVAL_S)
    raise Unavailable(
        printable(
            f"this PC still holds layers: {trouble}. They move as soon as other PCs can "
            f"take them; {place.format_command('resume')} keeps them here, "
            f"{place.format_command('down')} stops molink anyway."
        )
    )


def resume(device: DeviceOption = None, home: HomeOption = None) -> None:
    """Let this PC hold layers again."""
    from molinkd.cli import daemon_client

    daemon_client.set_drain(daemon_client.require_daemon(home), device or "", on=False)
    print(f"{printable(device) if device else 'This PC'} can hold layers again.")


def rebalance(home: HomeOption = None) -> None:
    """Reassign all layers across the connected PCs.

    The swarm normally keeps a working placement unless another one is much better. Running answers
    continue.
    """
    from molink.wire.messages.admin import Rebalance
    from molinkd.cli import daemon_client
    from molinkd.peer.home import Home

    daemon_client.send_request(daemon_client.require_daemon(home), Rebalance(ref=0))
    watch = Home.find_home(home).format_command("status")
    print(printable(f"Reassigning all layers. Follow progress with {watch}."))


def _own_peers(status: dict[str, Any], pid: int, device: str | None) -> list[dict[str, Any]]:
    """Return the peers of this PC, or of one device; empty if unknown."""
    own = next((peer for peer in status["peers"] if peer["daemon_pid"] == pid), None)
    if own is None:
        return []
    mine = [own, *(peer for peer in status["peers"] if peer.get("pc") == own["id"])]
    named = [peer for peer in mine if peer["name"].endswith(f"/{device}")]
    return mine if device is None else named or [own]


def _is_stuck(status: dict[str, Any], own: list[dict[str, Any]]) -> bool:
    """Whether the swarm has tried to move the layers and failed."""
    return bool(any(one.get("paused") for one in own) and status.get("trouble"))
