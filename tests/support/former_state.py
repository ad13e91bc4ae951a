"""The state folder that a PC with a former version left: ``tests/molinkd/coordinator/state_9``."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from molinkd.coordinator.state_store import STATE_FILE
from molinkd.peer.home import Home

_FOLDER = Path(__file__).parents[1] / "molinkd" / "coordinator" / "state_9"
#: The format of the state, and the swarm in it.
FORMAT, SWARM = 9, "d6c43d6d40f4c627"


def restore_home(root: Path) -> Home:
    """Create the folder of a PC that founded the swarm and served the bundled model alone."""
    home = Home(root)
    home.coordinator.mkdir(parents=True)
    for name in ("peer.key", "swarm.json", "options.json", "replica.msgpack"):
        shutil.copy(_FOLDER / name, home.root)
    shutil.copy(_FOLDER / "coordinator.key", home.coordinator)
    with closing(sqlite3.connect(home.coordinator / STATE_FILE)) as connection:
        connection.executescript((_FOLDER / "swarm.sql").read_text(encoding="utf-8"))
    return home
