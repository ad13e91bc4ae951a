"""``molink coordinator``: the control plane without a peer."""

import asyncio
from contextlib import AsyncExitStack

from molink.errors import UsageError
from molink.plaintext import printable
from molink.wire.sockets.loop import EventLoop
from molinkd.cli import local_daemon
from molinkd.peer.founder import start_coordinator
from molinkd.peer.home import Home, HomeLock
from molinkd.peer.membership import read_membership
from molinkd.peer.platform import until_terminated
from molinkd.peer.settings import Settings


def run_coordinator(home: Home, settings: Settings) -> None:
    """Run until Ctrl-C. The state is that of ``molink up`` in the same folder.

    Raises:
        UsageError: it can't start; says why.
    """
    known = read_membership(home.create().membership)
    if known is not None and not known.own:
        raise UsageError(
            f"this PC is a member of swarm {known.swarm}, whose coordinator runs elsewhere. Give "
            "another state folder with --home, or run `molink leave` first."
        )
    lock = HomeLock(home)
    lock.acquire()
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(_run(home, settings))
    finally:
        lock.release()


async def _run(home: Home, settings: Settings) -> None:
    with until_terminated() as stopped:
        async with AsyncExitStack() as stack:
            membership = await start_coordinator(home, home.keys(), settings, stack)
            membership.save(home.membership)
            token = await asyncio.to_thread(local_daemon.fetch_invite, home, settings.token_ttl)
            print(f"Swarm {membership.swarm} listens at {membership.addresses[0]}.\n")
            print(f"To add a PC, run there:\n\n  molink join {printable(token)}\n", flush=True)
            print("The first one names the model: add --model to it. Ctrl-C stops it.", flush=True)
            await stopped.wait()
