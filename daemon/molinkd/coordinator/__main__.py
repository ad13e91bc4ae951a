"""``python -m molinkd.coordinator``: the coordinator process."""

import sys

from molinkd.coordinator.main import main

sys.exit(main())
