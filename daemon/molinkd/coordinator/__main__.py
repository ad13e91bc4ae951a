"""``python -m molinkd.coordinator``: the coordinator process."""

import sys

from molinkd.coordinator.process import main

sys.exit(main())
