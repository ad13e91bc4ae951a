"""molink as a later version with another protocol: ``python -m tests.support.newer_protocol``."""

import molink
from molink.wire import protocol

molink.__version__, protocol.PROTOCOL = "99.0", 99

from molinkd.cli.main import main  # noqa: E402  it is to see the other version

if __name__ == "__main__":
    main()
