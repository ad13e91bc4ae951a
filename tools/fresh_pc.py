"""What a new user does, on a fresh Debian without git: install, ask, add a PC, update, remove.

    python -m tools.fresh_pc [--suite trixie] [--mirror URL]

Needs root and ``debootstrap`` (Linux). The fresh system is a folder with Python and curl; two
releases made of this checkout are served on loopback. It prints how long each step took, and the
disk space of the installation.
"""

import argparse
import contextlib
import functools
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools import release

PACKAGES = "python3,python3-venv,curl,ca-certificates,procps"
NEWER = "99.0.0"
#: Files of the host that the network needs.
_SHARED = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs")
_VARIABLES = re.compile(r"PIP_|SSL_CERT|(https?|no)_proxy$", re.IGNORECASE)
_PROGRAM = ".local/share/molink"
#: The home of the fresh system's user.
_HOME = "/home/user"
#: Two PCs on one: other folders and ports. Multicast would find other swarms.
_PC = "MOLINK_DISCOVERY=false MOLINK_HOST=127.0.0.1 MOLINK_THREADS=1 MOLINK_HOME={home}/{name}"
_ANY_PORTS = "MOLINK_{}_PORT=0"


class FreshPc:
    """A Debian in a folder, and the times of what ran there."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / _HOME.lstrip("/")
        self.home.mkdir(parents=True, exist_ok=True)
        self.times: list[tuple[str, float]] = []

    def run(self, step: str, command: str) -> str:
        """Run a command line of Bash there; return what it printed.

        Raises:
            SystemExit: it failed.
        """
        kept = {key: text for key, text in os.environ.items() if _VARIABLES.match(key)}
        environment = {"HOME": _HOME, "PATH": f"{_HOME}/.local/bin:/usr/bin:/bin", **kept}
        began = time.monotonic()
        done = subprocess.run(
            [shutil.which("chroot") or "chroot", str(self.root), "bash", "-ceu", f"cd; {command}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.times.append((step, time.monotonic() - began))
        print(f"{step}: {self.times[-1][1]:.0f} s", flush=True)
        if done.returncode:
            raise SystemExit(f"{command}\n{done.stdout[-5000:]}")
        return done.stdout

    def measure_disk(self) -> int:
        """The megabytes of the program."""
        folder = self.home / _PROGRAM
        sizes = (path.lstat().st_size for path in folder.rglob("*"))
        return sum(sizes) // 10**6

    def list_left(self) -> list[Path]:
        """Files of molink in the user's folder, and processes of the fresh system."""
        found = [path for path in self.home.rglob("*") if "molink" in path.name.lower()]
        found += [path for path in (self.home / "first",) if path.exists()]
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "root").readlink() == self.root:
                    found.append(process)
        return found


def main() -> None:
    """Walk through all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="trixie", help="Debian's version")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(folder / "releases") as url:
            release.make_release(folder / "releases" / "old", f"{url}/old")
            release.make_release(folder / "releases" / "new", f"{url}/new", NEWER)
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
            subprocess.run(
                [*command, options.suite, str(folder / "root"), options.mirror],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            with share_network(folder / "root"):
                walk(FreshPc(folder / "root"), url)


def walk(pc: FreshPc, url: str) -> None:
    """Do what a new user does.

    Raises:
        SystemExit: a step failed, or something is left at the end.
    """
    python = pc.run("python3 --version", "python3 --version").strip()
    pc.run("curl install.sh | bash", f"curl -fsS {url}/old/install.sh | bash -s -- --cpu")
    disk = pc.measure_disk()
    pc.run("molink demo --ask", 'molink demo --ask "What is molink?"')
    first, second = (f"{_PC.format(home=_HOME, name=each)} " for each in ("first", "second"))
    ports = " ".join(map(_ANY_PORTS.format, ("API", "CONTROL", "COORDINATOR")))
    second = f"{second}{ports} MOLINK_WORKER_PORTS=0-0 "
    pc.run("molink up", f"{first} molink up --background --model molink-demo --min-peers 2")
    token = pc.run("molink invite", f"{first} molink invite").split()[-1]
    pc.run("molink join, on the second PC", f"{second} molink join --background {token}")
    asks = f'{first} molink status --wait 100 && {first} molink chat "What is molink?"'
    pc.run("molink status --wait, molink chat", asks)
    pc.run("molink update, second PC", f"{second} molink update --yes --from {url}/new")
    # Both run one program, which is new by now.
    pc.run("restart of the first PC", f"{first} molink down; {first} molink up --background")
    found = pc.run("molink --version", "molink --version").strip()
    if found != f"molink {NEWER}":
        raise SystemExit(f"{found} instead of {NEWER}")
    pc.run("molink status --wait, molink chat", asks)
    pc.run("molink leave, second PC", f"{second} molink leave --yes")
    pc.run("molink uninstall", f"{first} molink uninstall --yes")
    if left := pc.list_left():
        raise SystemExit(f"left: {', '.join(map(str, left))}")
    print(f"{python}: {disk} MB on disk; nothing is left")


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback."""
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def share_network(root: Path) -> Iterator[None]:
    """Give the fresh system this machine's names, certificates and list of processes."""
    for name in _SHARED:
        target = root / name.lstrip("/")
        if Path(name).is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, symlinks=False, ignore_dangling_symlinks=True)
        else:
            target.unlink(missing_ok=True)
            shutil.copy(name, target)
    # Not /dev: debootstrap makes what is needed, and deleting the folder must reach no device here.
    place = str(root / "proc")
    subprocess.run(["mount", "-t", "proc", "proc", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


if __name__ == "__main__":
    main()
