"""Make the files of a release, the same bytes for everybody.

    python -m tools.release FOLDER [--url URL] [--key KEY] [--tag v1.2.3]

FOLDER gets the wheel, the source archive, the locked requirements, a bill of materials (CycloneDX),
the installers, ``release.json`` and ``SHA256SUMS``. ``--url`` is where people will find them: the
installers and ``molink update`` look there. ``molink update`` takes only what minisign's public
``--key`` has signed. ``--tag`` has to be the version's.
"""

import argparse
import datetime
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import molink
from molink.wire.protocol import PROTOCOL
from molinkd.coordinator.schema import SCHEMA_VERSION

ROOT = Path(__file__).resolve().parent.parent
#: What the product is built from.
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "install.sh", "install.ps1")
FOLDERS = ("molink", "daemon", "configs", "requirements")
SUMS = "SHA256SUMS"
#: The first moment that a ZIP archive can name, for trees without a history.
_OLDEST = 315_532_800
_HISTORY = ("git", "log", "-1", "--format=%ct")
_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def main() -> None:
    """Make a release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="", help="where the release will be")
    parser.add_argument("--key", default="", help="minisign's public key, which signs releases")
    parser.add_argument("--tag", default="", help="refuse to go on if this is another version")
    options = parser.parse_args()
    if options.tag not in ("", f"v{molink.__version__}"):
        parser.error(f"the tag {options.tag} is not v{molink.__version__} (molink/__init__.py)")
    if options.url and not re.fullmatch(r"https?://[\w.:/~-]+", options.url):
        parser.error(f"{options.url!r} is no URL of a folder")
    if options.key and not re.fullmatch(r"RW[\w+/]{54}", options.key):
        parser.error(f"{options.key!r} is no public key of minisign")
    make_release(options.folder, options.url.rstrip("/"), key=options.key)
    print((options.folder / SUMS).read_text(encoding="utf-8"), end="")


def make_release(
    folder: Path, url: str = "", version: str = molink.__version__, key: str = ""
) -> None:
    """Fill ``folder``, which must not exist, with all files. Tests release other versions."""
    folder.mkdir(parents=True)
    epoch = read_epoch()
    source = copy_source(folder / "source", epoch, url, version, key)
    build_wheel(source, folder, epoch)
    build_archive(source, folder, epoch)
    for name in ("install.sh", "install.ps1"):
        shutil.copy(source / name, folder)
    shutil.copy(source / "requirements" / "base.txt", folder / "requirements.txt")
    shutil.rmtree(source)
    about = {"version": version, "protocol": PROTOCOL, "state": SCHEMA_VERSION}
    write_json(folder / "release.json", about)
    write_json(folder / "sbom.cdx.json", describe_components(epoch, version))
    write_sums(folder)


def read_epoch() -> int:
    """The time that all files get, in Unix seconds: that of the commit, or of SOURCE_DATE_EPOCH."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        done = subprocess.run(_HISTORY, cwd=ROOT, capture_output=True, text=True, check=False)
        given = done.stdout.strip() if done.returncode == 0 else ""
    return max(_OLDEST, int(given or 0))


def copy_source(
    target: Path, epoch: int, url: str = "", version: str = molink.__version__, key: str = ""
) -> Path:
    """Copy what the product is built from; rights and times don't depend on the checkout."""
    target.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(ROOT / name, target / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    if url:
        stamp_url(target, url)
    if key:
        write_text(target / "molink" / "data" / "release.key", f"{key}\n")
    package = target / "molink" / "__init__.py"
    text = package.read_text(encoding="utf-8")
    write_text(package, text.replace(f'"{molink.__version__}"', f'"{version}"'))
    for path in (target, *target.rglob("*")):
        runs = path.is_dir() or path.suffix == ".sh"
        path.chmod(0o755 if runs else 0o644)
        os.utime(path, (epoch, epoch))
    return target


def stamp_url(source: Path, url: str) -> None:
    """Write where the release will be into the package's metadata and the installers."""
    project = source / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    write_text(project, f'{text}\n[project.urls]\nReleases = "{url}"\n')
    for name, line in (("install.sh", "RELEASES=''"), ("install.ps1", "$Releases = ''")):
        text = (source / name).read_text(encoding="utf-8")
        if text.count(f"\n{line}\n") != 1:
            raise SystemExit(f"{name} has no line {line}")
        write_text(source / name, text.replace(f"\n{line}\n", f"\n{line[:-1]}{url}'\n"))


def build_wheel(source: Path, folder: Path, epoch: int) -> Path:
    """Build the wheel of a copy, with the setuptools of this environment."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    _run([*pip, "-w", str(folder.absolute()), "."], source, epoch)
    (wheel,) = folder.glob("molink-*.whl")
    return wheel


def build_archive(source: Path, folder: Path, epoch: int) -> Path:
    """Build the source archive of a copy; rewrite it without setuptools' user names and times."""
    _run([sys.executable, "-c", _SDIST, str(folder.absolute())], source, epoch)
    (archive,) = folder.glob("molink-*.tar.gz")
    draft = archive.with_suffix(".part")
    with (
        tarfile.open(archive) as before,
        draft.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=epoch, fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda one: one.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = 0o755 if member.isdir() or member.name.endswith(".sh") else 0o644
            after.addfile(plain, before.extractfile(member) if member.isfile() else None)
    draft.replace(archive)
    return archive


def _run(command: list[str], source: Path, epoch: int) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    # Else generated files have the rights that this user's files have.
    mask = {} if sys.platform == "win32" else {"umask": 0o022}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, check=False, **mask
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def describe_components(epoch: int, version: str) -> dict[str, Any]:
    """The bill of materials: what molink is made of and asks for, in CycloneDX's form."""
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC)
    application = component("pypi", "molink", version) | {
        "type": "application",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    found = {one["bom-ref"]: one for one in (*read_vendored(), *read_locked())}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": application,
        },
        "components": [found[ref] for ref in sorted(found)],
    }


def component(kind: str, name: str, version: str) -> dict[str, Any]:
    """A component that is a package of an index."""
    purl = f"pkg:{kind}/{name.replace('@', '%40')}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def read_vendored() -> Iterator[dict[str, Any]]:
    """The scripts in the chat page."""
    path = ROOT / "molink" / "data" / "page" / "vendor" / "vendored.toml"
    for one in tomllib.loads(path.read_text(encoding="utf-8")).values():
        licences = [{"license": {"id": one["licence"]}}]
        yield component("npm", one["npm"], one["version"]) | {"licenses": licences}


def read_locked() -> Iterator[dict[str, Any]]:
    """The locked requirements, torch's included."""
    for name in ("base.txt", "torch.txt"):
        text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
        for package, version in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE):
            yield component("pypi", package, version)


def write_sums(folder: Path) -> None:
    """Write the hashes of all files in ``folder``, as ``sha256sum`` does."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    ]
    write_text(folder / SUMS, "".join(lines))


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text with the line ends of Linux, everywhere."""
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
