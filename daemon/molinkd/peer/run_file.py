"""The file by which the command line finds a running daemon."""

from pathlib import Path

import msgspec
import psutil

from molink.wire.sockets.secrets import write_secret


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """A running daemon. ``started`` (Unix time) guards against reuse of its process id."""

    pid: int
    started: float
    control_port: int
    endpoint: str
    #: Host of the control socket, for this PC.
    control_host: str = "127.0.0.1"
    #: API endpoints of all peers of a demo.
    demo: tuple[str, ...] = ()

    @classmethod
    def of_this_process(
        cls,
        control_port: int,
        endpoint: str,
        demo: tuple[str, ...] = (),
        control_host: str = "127.0.0.1",
    ) -> "RunFile":
        """The run file of the calling process."""
        process = psutil.Process()
        return cls(
            pid=process.pid,
            started=process.create_time(),
            control_port=control_port,
            endpoint=endpoint,
            control_host=control_host,
            demo=demo,
        )

    def save_file(self, path: Path) -> None:
        """Write the file atomically."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            process = psutil.Process(self.pid)
            same = bool(abs(process.create_time() - self.started) < 2.0)
            return same and bool(process.status() != psutil.STATUS_ZOMBIE)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def read_run_file(path: Path) -> RunFile | None:
    """The run file of a running daemon; ``None`` if it is missing or stale."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.is_alive() else None
