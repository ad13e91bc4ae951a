"""molink as a later version with the same protocol: ``python -m
tests.support.newer_version``."""

import molink

molink.__version__ = "9.9.9"

from molinkd.cli.main import main  # noqa: E402  it is to see the other version

if __name__ == "__main__":
    main()
