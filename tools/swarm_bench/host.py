"""``python -m tools.swarm_bench.host EMULATION``: a daemon whose stages are emulated.

Launch options and events are those of ``python -m molinkd.peer``.
"""

import sys
from functools import partial

from molinkd.imports import permanent_imports

with permanent_imports():
    from molinkd.peer.agent import stage_manager
    from molinkd.peer.agent.worker_supervisor import WorkerSupervisor
    from molinkd.peer.main import main

if __name__ == "__main__":
    worker = (sys.executable, "-m", "tools.emulation.worker", sys.argv.pop())
    supervisor = partial(WorkerSupervisor, command=worker)
    stage_manager.WorkerSupervisor = supervisor  # type: ignore[assignment, attr-defined]
    main()
