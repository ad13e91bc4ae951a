"""``python -m tests.support.altering_peer`` is ``molink`` on a PC that alters the weights that it
sends."""

from molinkd.cli.main import main
from molinkd.peer.artifacts.model_repository import ModelFiles

_honest = ModelFiles.read_chunk


def _read(self: ModelFiles, name: str, index: int) -> bytes:
    data = _honest(self, name, index)
    if name in self.manifest.files:
        return data
    return data[:-1] + bytes([data[-1] ^ 1])


if __name__ == "__main__":
    ModelFiles.read_chunk = _read  # type: ignore[method-assign]
    main()
