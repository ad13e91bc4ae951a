"""``molink top``."""

import asyncio
import json
import shutil
import sys
from typing import Annotated

import msgspec
import typer

from molink.swarm.controller.status_schema import decode_status
from molink.wire.messages.admin import StatusRequest
from molink.wire.sockets.event_loop import EventLoop
from molinkd.cli import daemon_client
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.top.layout import MIN_WIDTH, screen_lines
from molinkd.cli.top.view import SwarmView, make_view


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one plain-text snapshot.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON snapshot.")] = False,
    home: HomeOption = None,
) -> None:
    """Live view of the swarm: stages, links, requests, transfers and events."""
    found = daemon_client.require_daemon(home)
    # The screen is drawn on stderr.
    terminals = all(one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr))
    if as_json or once or not terminals:
        view = _fetch_view(found)
        if as_json:
            print(json.dumps(msgspec.to_builtins(view), indent=2))
        else:
            width = max(MIN_WIDTH, shutil.get_terminal_size((MIN_WIDTH, 24)).columns)
            print("\n".join(line.plain.rstrip() for line in screen_lines(view, width)))
        return
    from molinkd.cli.top.app import run_top

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run_top(home))


def _fetch_view(found: daemon_client.RunningDaemon) -> SwarmView:
    _, payload = daemon_client.send_request(found, StatusRequest(ref=0))
    return make_view(decode_status(payload), demo=found.is_demo)
