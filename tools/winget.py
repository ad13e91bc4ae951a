"""Print a manifest of the setup program for winget.

    python -m tools.winget SETUP URL

SETUP is what Inno Setup made of ``deploy/windows/molink.iss``, URL where people will download it.
The version is this checkout's.
"""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml

import molink


def main() -> None:
    """Print the manifest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setup", type=Path)
    parser.add_argument("url")
    options = parser.parse_args()
    digest = hashlib.sha256(options.setup.read_bytes()).hexdigest()
    yaml.safe_dump(describe_package(options.url, digest), sys.stdout, sort_keys=False)


def describe_package(url: str, digest: str) -> dict[str, Any]:
    """Return a manifest in one file (``singleton``, version 1.6.0)."""
    installer = {
        "Architecture": "x64",
        "InstallerType": "inno",
        "Scope": "user",
        "InstallerUrl": url,
        "InstallerSha256": digest.upper(),
        "Dependencies": {"PackageDependencies": [{"PackageIdentifier": "Python.Python.3.13"}]},
    }
    return {
        "PackageIdentifier": "molink.molink",
        "PackageVersion": molink.__version__,
        "PackageLocale": "en-US",
        "Publisher": "molink",
        "PackageName": "molink",
        "License": "Apache-2.0",
        "ShortDescription": "Pool the PCs you already own into one LLM server",
        "Moniker": "molink",
        "Commands": ["molink"],
        "Installers": [installer],
        "ManifestType": "singleton",
        "ManifestVersion": "1.6.0",
    }


if __name__ == "__main__":
    main()
