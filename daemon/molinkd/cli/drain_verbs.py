"""Who holds layers, as a person wants it: ``molink drain``, ``resume`` and ``rebalance``."""

import time
from typing import Annotated, Any

import typer

from molink.errors import Unavailable
from molink.plaintext import printable
from molinkd.cli.swarm_verbs import HomeOption

DeviceOption = Annotated[
    str | None, typer.Option(help="Only that one of this PC's devices: cuda:1.  [default: all]")
]

#: How often the swarm is looked at, in seconds.
_POLL_INTERVAL_S = 0.5


def drain(
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the others to take over.")
    ] = 120.0,
    device: DeviceOption = None,
    home: HomeOption = None,
) -> None:
    """Hold no layers on this PC: others take them, memory is free.

    It lasts until `molink resume`, or until molink is started here again.
    """
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.peer.home import Home

    place, found = Home.find_home(home), local_daemon.require_daemon(home)
    local_daemon.set_drain(found, device or "", on=True)
    deadline = time.monotonic() + timeout
    trouble = "the others have not taken them yet"
    while True:
        status = local_daemon.fetch_status(found)
        own = _own_peers(status, found.run_file.pid, device)
        if own and not any(one["workers"] for one in own):
            what = f"{device} of this PC" if device else "This PC"
            ends = f"{place.format_command('resume')} ends that."
            print(printable(f"{what} holds no layers now; its endpoint goes on. {ends}"))
            return
        trouble = status.get("trouble") or trouble
        if time.monotonic() >= deadline or _is_stuck(status, own):
            break
        time.sleep(_POLL_INTERVAL_S)
    raise Unavailable(
        printable(
            f"the layers of this PC stay here for now: {trouble}. They go as soon as others can "
            f"take them; {place.format_command('resume')} keeps them here, "
            f"{place.format_command('down')} ends "
            "molink here anyway."
        )
    )


def resume(device: DeviceOption = None, home: HomeOption = None) -> None:
    """Offer to hold layers on this PC again, after `molink drain`."""
    from molinkd.cli import daemon_client as local_daemon

    local_daemon.set_drain(local_daemon.require_daemon(home), device or "", on=False)
    print(f"{printable(device) if device else 'This PC'} offers to hold layers again.")


def rebalance(home: HomeOption = None) -> None:
    """Place all models anew over the PCs that are here.

    By itself the swarm leaves what serves where it is, unless another ring is much better. Answers
    go on meanwhile.
    """
    from molink.wire.messages.admin import Rebalance
    from molinkd.cli import daemon_client as local_daemon
    from molinkd.peer.home import Home

    local_daemon.send_request(local_daemon.require_daemon(home), Rebalance(ref=0))
    watch = Home.find_home(home).format_command("status")
    print(printable(f"All models are placed anew; {watch} shows what becomes of it."))


def _own_peers(status: dict[str, Any], pid: int, device: str | None) -> list[dict[str, Any]]:
    """The peers of this PC, or that of one device; none if they are not known."""
    own = next((peer for peer in status["peers"] if peer["daemon_pid"] == pid), None)
    if own is None:
        return []
    mine = [own, *(peer for peer in status["peers"] if peer.get("pc") == own["id"])]
    named = [peer for peer in mine if peer["name"].endswith(f"/{device}")]
    return mine if device is None else named or [own]


def _is_stuck(status: dict[str, Any], own: list[dict[str, Any]]) -> bool:
    """Whether the swarm has looked at them, and knows no way."""
    return bool(any(one.get("paused") for one in own) and status.get("trouble"))
