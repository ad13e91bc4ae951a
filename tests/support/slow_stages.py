"""``python -m tests.support.slow_stages`` is ``molink`` with stages as slow as those of larger
models.

So streams go on for long, and leave the processors to what is tested beside them.
"""

import sys
from functools import partial

from molinkd.cli.main import main
from molinkd.peer.agent import stage_manager as assignments

#: As ``-m molinkd.worker``; by the last word a worker is known to those that look for some.
COMMAND = (sys.executable, "-P", "-c", "import tests.support.slow_worker", "molinkd.worker")

if __name__ == "__main__":
    assignments.WorkerSupervisor = partial(assignments.WorkerSupervisor, command=COMMAND)  # type: ignore[misc]
    main()
