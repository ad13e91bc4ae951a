"""``python -m tests.support.status_stream``: ``molink status --json``, a line for each that comes.

One process where a test looks often: each ``molink status`` would import all that it needs.
"""

import json
import sys

from molink.errors import MolinkError
from molinkd.cli import daemon_client as local_daemon
from molinkd.peer.home import Home


def main() -> None:
    """Until the input ends; ``{}`` where there is no answer."""
    for _ in sys.stdin:
        found = local_daemon.find_daemon(Home.find_home(None))
        try:
            status = {} if found is None else local_daemon.fetch_status(found)
        except MolinkError:
            status = {}
        print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main()
