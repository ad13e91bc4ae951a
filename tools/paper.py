"""The MoLink paper's tables: ``python tools/paper.py --help``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, only its own folder is looked in for modules.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.paperbench.command import main

    sys.exit(main())
