"""``molink apply``: have the swarm serve what a file names."""

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
from molinkd.cli import daemon_client as local_daemon
from molinkd.cli.daemon_console import TransferLine
from molinkd.cli.model_verbs import POLL_INTERVAL_S, show_progress
from molinkd.cli.swarm_file import LineIndex, SwarmFile, model_entries, read_swarm_file, served_name
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.artifacts.progress import Progress


def apply(
    file: Annotated[Path, typer.Argument(help="A TOML file with a [[models]] for each model.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    home: HomeOption = None,
) -> None:
    """Have the swarm serve the models that a file names, and no others; twice is as once."""
    found, lines = read_swarm_file(file)
    models = model_entries(found, lines, file.absolute().parent)
    daemon = local_daemon.require_daemon(home)
    order = ApplyFile(ref=0, models=models, molink=found.molink, dry_run=dry_run)
    try:
        changes = _apply_file(daemon, order)
    except RequestError as error:
        raise _locate_error(error, found, lines) from None
    for line in changes.splitlines():
        print(printable(line))
    if not changes:
        print("Nothing to change: the swarm is asked for this already.")
    elif dry_run:
        print("Nothing was changed (--dry-run).")
    else:
        print("Applied; `molink status` shows how far it is.")


def _apply_file(daemon: local_daemon.RunningDaemon, order: ApplyFile) -> str:
    """Ask until all models are found and the coordinator has answered: what changes."""
    line = TransferLine(Console(stderr=True, highlight=False, soft_wrap=True))
    speed, doing = TransferRate(time.monotonic()), ("", "")
    try:
        while True:
            far, payload = local_daemon.send_request(daemon, order)
            if isinstance(far, ApplyReply):
                return payload.decode("utf-8")
            assert isinstance(far, LoadModelReply)
            if (far.name, far.state) != doing:
                speed, doing = TransferRate(time.monotonic(), far.done), (far.name, far.state)
            progress = Progress(far.done, far.total)
            progress.source = "the hub" if far.state == "fetching" else "disk, to hash it once"
            show_progress(line, far.name or "a model", progress, speed)
            time.sleep(POLL_INTERVAL_S)
    finally:
        line.clear_line()


def _locate_error(error: RequestError, file: SwarmFile, lines: LineIndex) -> MolinkError:
    """The coordinator's refusal with the line that it is about: a PC's, else the model's."""
    text = str(error)
    if file.molink and text.startswith(f"the file requires molink {file.molink}"):
        return lines.error_at(text, key="molink")
    for index, one in enumerate(file.models):
        why = text.removeprefix(f"{served_name(one.model)}: ")
        if why != text:
            keys = [
                key
                for pc in (*one.layers, *one.pcs)
                if re.search(rf"(?<![\w-]){re.escape(pc)}(?![\w-])", why)
                for key in ((pc, "layers") if pc in one.layers else ("pcs",))
            ]
            return lines.error_at(text, index, lines.first_key(index, *keys))
    return error
