"""``molink apply``: serve the models of a file."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from molink.errors import MolinkError, RequestError
from molink.plaintext import printable
from molink.swarm.artifacts.transfer import TransferRate
from molink.wire.messages.admin import ApplyFile, ApplyReply, LoadModelReply
from molinkd.cli import daemon_client
from molinkd.cli.swarm_file import LineIndex, SwarmFile, model_entries, read_swarm_file
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.transfer_line import TransferLine
from molinkd.cli.transfer_progress import POLL_INTERVAL_S, show_progress
from molinkd.peer.artifacts.transfers import Progress

#: The model of the request that is at fault, or one of its PCs.
_PARAM = re.compile(r"models\[([0-9]+)\](?:\.pins\[([0-9]+)\])?\Z")


def apply(
    file: Annotated[Path, typer.Argument(help="TOML file with a [[models]] section per model.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the changes without applying them.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Serve exactly the models in a file; safe to repeat."""
    found, lines = read_swarm_file(file)
    models = model_entries(found, lines, file.absolute().parent)
    daemon = daemon_client.require_daemon(home)
    order = ApplyFile(ref=0, models=models, molink=found.molink, dry_run=dry_run)
    try:
        changes = _apply_file(daemon, order)
    except RequestError as error:
        raise _locate_error(error, found, lines) from None
    for line in changes.splitlines():
        print(printable(line))
    if not changes:
        print("Nothing to change.")
    elif dry_run:
        print("Dry run: nothing was changed.")
    else:
        print("Applied. Follow progress with `molink status`.")


def _apply_file(daemon: daemon_client.RunningDaemon, order: ApplyFile) -> str:
    """Poll until all models are located and the coordinator has replied; returns the changes."""
    line = TransferLine(Console(stderr=True, highlight=False, soft_wrap=True))
    speed, doing = TransferRate(time.monotonic()), ("", "")
    try:
        while True:
            far, payload = daemon_client.send_request(daemon, order)
            if isinstance(far, ApplyReply):
                return payload.decode("utf-8")
            assert isinstance(far, LoadModelReply)
            if (far.name, far.state) != doing:
                speed, doing = TransferRate(time.monotonic(), far.done), (far.name, far.state)
            progress = Progress(far.done, far.total)
            progress.source = "the hub" if far.state == "fetching" else "disk (hashing once)"
            show_progress(line, far.name or "a model", progress, speed)
            time.sleep(POLL_INTERVAL_S)
    finally:
        line.clear_line()


def _locate_error(error: RequestError, file: SwarmFile, lines: LineIndex) -> MolinkError:
    """Add the line of the file to an error of the coordinator."""
    if error.param == "molink":
        return lines.error_at(str(error), key="molink")
    found = _PARAM.match(error.param or "")
    if found is None or int(found[1]) >= len(file.models):
        return error
    keys: tuple[str, ...] = ()
    index = int(found[1])
    model = file.models[index]
    if found[2] is not None and int(found[2]) < len(model.pinned_pcs):
        pc = model.pinned_pcs[int(found[2])]
        keys = (pc, "layers") if pc in model.layers else ("pcs",)
    return lines.error_at(str(error), index, lines.first_key(index, *keys))
