"""``molink page``: the address of the chat page with the owner's rights."""

import os
import sys
from typing import Annotated

import typer
from yarl import URL

from molink.errors import Unavailable
from molink.plaintext import printable
from molinkd.cli import daemon_client
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.home import Home, read_run_file
from molinkd.peer.membership.addresses import advertised_addresses, is_wildcard
from molinkd.peer.settings import load_settings, read_options


def page(
    token: Annotated[
        bool, typer.Option("--token", help="Print only the token, for other clients.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Print the chat page's address, with the right to change the swarm.

    Whoever has the address can approve PCs and load models until molink restarts: keep it secret.
    """
    found = daemon_client.require_daemon(home)
    run_file = read_run_file(found.home.run_file)
    if run_file is None or not run_file.owner_token:
        raise Unavailable("the daemon is still starting; try again in a moment")
    if token:
        print(run_file.owner_token)
        return
    for address in _page_addresses(Home.find_home(home), run_file.endpoint):
        print(printable(f"{address}/#owner={run_file.owner_token}"))
    note = "With this address, anyone can change the swarm until molink restarts."
    print(note, file=sys.stderr)


def _page_addresses(home: Home, endpoint: str) -> list[str]:
    """The endpoint's URLs: for this PC, and for others if it listens on all addresses."""
    settings = load_settings(home, {}, os.environ, read_options(home.options))
    if not is_wildcard(settings.api_host):
        return [endpoint]
    own = URL(endpoint)
    others = advertised_addresses(settings.api_host, settings.advertise)
    return [endpoint, *(str(own.with_host(one)) for one in others)]
