"""``python -m tests.support.liar`` is ``molink`` on a PC that alters the weights that it sends."""

from molinkd.cli.main import main
from molinkd.peer.artifacts.library import Holding

_honest = Holding.read


def _read(self: Holding, name: str, index: int) -> bytes:
    data = _honest(self, name, index)
    if name in self.manifest.files:
        return data
    return data[:-1] + bytes([data[-1] ^ 1])


if __name__ == "__main__":
    Holding.read = _read  # type: ignore[method-assign]
    main()
