"""The note that a running daemon leaves in its home, so that the command line finds it."""

from pathlib import Path

import msgspec
import psutil

from molink.wire.sockets.secrets import write_secret


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """A running daemon. ``started`` (seconds since 1970) tells it from a later process."""

    pid: int
    started: float
    control_port: int
    endpoint: str
    #: Where the control socket listens, as seen from this PC.
    control_host: str = "127.0.0.1"
    #: Endpoints of all peers, if this is a demo.
    demo: tuple[str, ...] = ()

    @classmethod
    def of_this_process(
        cls,
        control_port: int,
        endpoint: str,
        demo: tuple[str, ...] = (),
        control_host: str = "127.0.0.1",
    ) -> "RunFile":
        """The note for the calling process."""
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
        """Write the note in one step."""
        write_secret(path, msgspec.json.encode(self).decode("utf-8"))

    def is_alive(self) -> bool:
        """Whether the process that wrote the note still runs."""
        try:
            process = psutil.Process(self.pid)
            same = bool(abs(process.create_time() - self.started) < 2.0)
            return same and bool(process.status() != psutil.STATUS_ZOMBIE)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def read_run_file(path: Path) -> RunFile | None:
    """The note of a daemon that runs; ``None`` if there is none or it is stale."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.is_alive() else None
