"""``python -m molink.swarm``: the coordinator process."""

import sys

from molink.swarm.process import main

sys.exit(main())
