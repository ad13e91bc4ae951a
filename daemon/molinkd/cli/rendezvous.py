"""``molink rendezvous``: a small server at which PCs behind routers meet."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from molink.errors import UsageError
from molink.plaintext import printable
from molink.wire.messages.rendezvous import DEFAULT_PORT, RendezvousAddress, generate_secret
from molinkd.cli.swarm_verbs import HomeOption


def rendezvous(
    host: Annotated[
        str | None, typer.Option(help="Address to bind.  [default: all interfaces]")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for PCs.")] = DEFAULT_PORT,
    advertise: Annotated[
        str | None,
        typer.Option(help="This server's public address or name.  [default: this PC's]"),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Run a server at which PCs behind routers meet. It belongs to no swarm.

    It prints the line for the swarm's first PC. It sees who talks to whom, but nothing that they
    say.
    """
    from molink.wire.sockets.event_loop import EventLoop
    from molinkd.peer.home import Home
    from molinkd.peer.membership.addresses import advertised_addresses, is_reachable_name

    if advertise is not None and not is_reachable_name(advertise):
        raise UsageError(f"--advertise takes an address or a host name, not {advertise!r}")
    place = Home.find_home(home).create_folders()
    named = advertise or advertised_addresses(host or "0.0.0.0")[0]
    address = RendezvousAddress(load_secret(place.rendezvous), named, port)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(_serve(host or "", address))


def load_secret(path: Path) -> bytes:
    """The secret in ``path``; a new one if there is no file.

    Raises:
        UsageError: the file can't be read or written, or holds no secret.
    """
    from molink.wire.messages.rendezvous import decode_secret, encode_secret
    from molink.wire.sockets.secrets import read_secret, write_secret

    try:
        return decode_secret(read_secret(path).strip())
    except FileNotFoundError:
        secret = generate_secret()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {error}. Delete it for a new secret") from None
    try:
        write_secret(path, encode_secret(secret) + "\n")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror or error}") from None
    return secret


async def _serve(host: str, address: RendezvousAddress) -> None:
    from molinkd.peer.membership.rendezvous_server import RendezvousServer
    from molinkd.platform import until_terminated

    server = RendezvousServer(address.secret)
    address = address._replace(port=server.listen(host, address.port))
    try:
        with until_terminated() as stopped:
            print(printable(_describe(address), keep="\n"), flush=True)
            await stopped.wait()
    finally:
        await server.close()


def _describe(address: RendezvousAddress) -> str:
    return (
        f"The rendezvous listens on port {address.port}. On the first PC of your swarm run\n\n"
        f"    molink up --rendezvous {address}\n\n"
        "Tokens of `molink invite` tell it to the others. Whoever knows this address may use it. "
        "Ctrl-C stops it."
    )
