"""``molink coordinator``: the control plane without a peer."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from molink.errors import UsageError
from molink.facts.identity import derive_peer_id
from molink.plaintext import printable
from molink.swarm.election.events import StartCoordinatorAction
from molink.wire.messages.rendezvous import COORDINATOR
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.election.coordinator_process import create_coordinator_process
from molinkd.peer.home import Home, HomeLock
from molinkd.peer.membership.addresses import advertised_addresses, local_dial_host
from molinkd.peer.membership.membership_record import MembershipRecord, read_membership
from molinkd.peer.membership.rendezvous_client import open_rendezvous
from molinkd.peer.settings import Settings
from molinkd.platform import until_terminated


@dataclass(frozen=True, slots=True)
class _CoordinatorHost:
    settings: Settings
    home: Home
    keys: KeyPair

    @property
    def addresses(self) -> tuple[str, ...]:
        return advertised_addresses(self.settings.host, self.settings.advertise)


def run_coordinator(home: Home, settings: Settings) -> None:
    """Run the coordinator until Ctrl-C, with the state of ``molink up`` in the same folder.

    Raises:
        UsageError: it can't start.
    """
    known = read_membership(home.create_folders().membership)
    if known is not None and not known.is_founder:
        raise UsageError(
            f"this PC is a member of swarm {known.swarm}, whose coordinator runs elsewhere. "
            f"Use another state folder with --home, or run {home.format_command('leave')} "
            "first."
        )
    lock = HomeLock(home)
    lock.acquire()
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(_run(home, settings, known))
    finally:
        lock.release()


async def _run(home: Home, settings: Settings, known: MembershipRecord | None) -> None:
    with until_terminated() as stopped:
        async with AsyncExitStack() as stack:
            place = _CoordinatorHost(settings, home, home.load_keys())
            process = create_coordinator_process(
                place, known, None, StartCoordinatorAction(0), leader=""
            )
            stack.push_async_callback(process.close)
            announcement = await process.start()
            rendezvous = open_rendezvous(
                settings.rendezvous, place.keys, local_dial_host(settings.host)
            )
            if rendezvous is not None:
                stack.push_async_callback(rendezvous.close)
                rendezvous.on_problem = lambda text: print(printable(text), flush=True)
                rendezvous.start(lambda wanted: process.port if wanted == COORDINATOR else 0)
            membership = MembershipRecord(
                swarm=announcement.swarm,
                coordinator_key=announcement.public_key,
                addresses=(f"{local_dial_host(settings.host)}:{announcement.port}",),
                is_founder=True,
                model=known.model if known is not None else None,
                rendezvous="" if rendezvous is None else str(rendezvous.address),
                first_leader=derive_peer_id(place.keys.public),
            )
            membership.save(home.membership)
            invite = home.format_command("invite")
            print(f"Swarm {membership.swarm} listens at {membership.addresses[0]}.")
            print(
                printable(
                    f"To add a PC, run {invite} here and `molink join TOKEN` there, with --model "
                    "on the first PC to choose the model. Ctrl-C stops the coordinator."
                ),
                flush=True,
            )
            await stopped.wait()
