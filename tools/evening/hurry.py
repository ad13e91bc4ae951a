"""Has the coordinator wait less, for an evening that is shorter than a real one.

    python -m tools.evening.hurry SCALE ARGUMENTS…

is ``python -m molinkd.coordinator ARGUMENTS…`` where what a placement waits for takes ``SCALE``
times as long: how long a pace has to stay and is remembered, and the time between two looks.
"""

import sys

from molink.swarm.controller import planner
from molink.swarm.placement import read_rates
from molinkd.coordinator.main import main


def hurry(scale: float) -> None:
    """From now on, in this process."""
    read_rates.STAYS *= scale
    read_rates.REMEMBERED *= scale
    planner.REVIEW_INTERVAL *= scale


if __name__ == "__main__":
    hurry(float(sys.argv.pop(1)))
    sys.exit(main())
