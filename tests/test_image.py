"""A real builder builds the image of ``deploy/Dockerfile``, which then serves.

No registry is needed: the base image is a Debian made here, with its Python in place of 3.12.
"""

import configparser
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from molinkd.cli.installation.setup import is_reachable
from molinkd.cli.installation.torch_build import INDEX
from tests.support.manifests import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TOOLS = ("debootstrap", "buildah")
PACKAGES = "python3,python3-venv,ca-certificates"
MIRROR = "http://deb.debian.org/debian"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.platform != "linux" or os.getuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root on Linux, and {' and '.join(TOOLS)}",
    ),
]


class Builder:
    """buildah with its own storage and without containers' isolation."""

    def __init__(self, folder: Path) -> None:
        storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._command = ["buildah", "--storage-driver", "vfs", *storage]
        self.options = packaging_options(folder)

    def run(self, *arguments: str | Path) -> str:
        """Run buildah; returns what it prints, and fails with it."""
        done = subprocess.run(
            [*self._command, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()


def packaging_options(folder: Path) -> list[str]:
    """Options by which pip finds packages in a build where it finds them here."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    values = dict(line.partition("=")[::2] for line in listed.stdout.splitlines())
    config = configparser.RawConfigParser()
    config["global"] = {
        name.rpartition(".")[2]: value.strip("'\"")
        for name, value in values.items()
        if name.startswith((":env:", "global."))
    }
    written = folder / "pip.conf"
    with written.open("w", encoding="utf-8") as file:
        config.write(file)
    words = {word for value in config["global"].values() for word in value.split()}
    # The files of a local index lie beside it.
    paths = {Path(word.removeprefix("file://").removesuffix("/simple")) for word in words}
    mounts = {written: Path("/etc/pip.conf")} | {
        path: path for path in paths if path.is_absolute() and path.exists()
    }
    found = [part for here, there in mounts.items() for part in ("-v", f"{here}:{there}:ro")]
    index = f"{INDEX}/cpu"
    if not is_reachable(f"{index}/torch/"):
        found += ["--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
    return found


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = tmp_path_factory.mktemp("image")
    debian, made = folder / "debian", Builder(folder)
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", debian, MIRROR],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (debian / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    base = next(line for line in DOCKERFILE.read_text("utf-8").splitlines() if "FROM" in line)
    container = made.run("from", "scratch")
    made.run("add", "-q", container, debian, "/")
    made.run("commit", "-q", "--rm", container, f"docker.io/library/{base.split()[1]}")
    yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def image(builder: Builder, request: pytest.FixtureRequest) -> str:
    """The image of a flavour; the CUDA flavour downloads 3 GB."""
    name = f"molink-{request.param}"
    builder.run(
        *("build", "--isolation", "chroot", "--pull=never", "--format", "docker"),
        *("-f", DOCKERFILE, "--ignorefile", f"{DOCKERFILE}.dockerignore", "-t", name),
        *("--build-arg", f"FLAVOUR={request.param}", *builder.options),
        ROOT,
    )
    return f"localhost/{name}"


def test_what_the_image_runs(builder: Builder, image: str) -> None:
    described = json.loads(builder.run("inspect", "--type", "image", image))
    config = described["Docker"]["config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["molink"]
    assert config["Healthcheck"]["Test"][0] == "CMD"


def test_it_answers_without_privileges(builder: Builder, image: str) -> None:
    container = builder.run("from", "--pull=never", image)

    def run(*words: str) -> str:
        return builder.run("run", "--isolation", "chroot", container, "--", *words)

    assert run("id", "-u") == "10001"
    assert run("sh", "-c", "touch /opt/molink/x 2>/dev/null || echo refused") == "refused"
    assert "LLM server" in run("molink", "demo", "--ask", "What is molink?")
    print(f"\n/opt/molink of {image}: {run('du', '-sm', '/opt/molink').split()[0]} MB")
