"""Record activations of a real model, which emulated stages send.

    python -m tools.emulation.activations [--model FOLDER] [--out FILE]

runs the first third of a model's layers over random tokens and keeps the bf16 rows. Rows of a
narrower model are *widened*: several rows of different tokens make one.
"""

import argparse
import random
from pathlib import Path

from molink.errors import UsageError

#: Recorded rows, more than the longest prompt.
ROWS = 2048
HIDDEN = 4096
#: Default path of a recording.
RECORDED = Path("build") / "emulation" / f"activations-{HIDDEN}.bin"
#: The bundled model.
BUNDLED = Path(__file__).parents[2] / "molink" / "data" / "demo_model"
_PASS = 256


class Activations:
    """Recorded rows, served cyclically."""

    def __init__(self, data: bytes, row_bytes: int) -> None:
        """Raises :class:`UsageError` unless ``data`` is a positive number of rows."""
        if not data or len(data) % row_bytes:
            raise UsageError(f"{len(data)} bytes are not rows of {row_bytes} bytes")
        self._row_bytes = row_bytes
        self._count = len(data) // row_bytes
        # Doubled, so that a slice may begin anywhere.
        self._data = memoryview(data + data).toreadonly()
        self._next = 0

    @classmethod
    def read(cls, path: Path, row_bytes: int) -> "Activations":
        """Read a recording."""
        try:
            return cls(path.read_bytes(), row_bytes)
        except OSError as error:
            raise UsageError(
                f"can't read recorded activations: {error}; make them with"
                " `python -m tools.emulation.activations`"
            ) from error

    def rows(self, count: int) -> memoryview:
        """The next ``count`` rows, read-only."""
        if count > self._count:
            repeats = -(-count // self._count)
            return memoryview(bytes(self._data[: self._count * self._row_bytes]) * repeats)[
                : count * self._row_bytes
            ]
        first = self._next
        self._next = (first + count) % self._count
        return self._data[first * self._row_bytes : (first + count) * self._row_bytes]


def record_rows(folder: Path, rows: int, hidden: int) -> bytes:
    """Record ``rows`` rows of ``hidden`` bf16 elements after a third of the layers.

    Raises:
        UsageError: ``hidden`` is no multiple of the model's.
    """
    import torch

    from molink.checkpoint.model_folder import ModelFolder
    from molink.stage.batch import SequenceRows, StageInput
    from molink.stage.stage import Stage

    opened = ModelFolder.open(folder)
    config = opened.config
    if hidden % config.hidden_size:
        raise UsageError(f"rows of {config.hidden_size} elements can't be widened to {hidden}")
    wanted = rows * (hidden // config.hidden_size)
    stage = Stage.load_layers(opened, (0, max(1, config.layers // 3)), "cpu", "bf16")
    length = min(1024, config.max_model_len)
    size = 16
    stage.allocate_kv_pool(-(-length // size), size)
    table = tuple(range(-(-length // size)))
    source = random.Random(0)
    parts = []
    while wanted > 0:
        # A new prompt each time.
        for start in range(0, min(length, wanted), _PASS):
            count = min(_PASS, length - start, wanted)
            ids = torch.tensor([source.randrange(config.vocab_size) for _ in range(count)])
            batch = StageInput(ids, None, (SequenceRows(start, count, table),))
            with torch.inference_mode():
                parts.append(stage.forward(batch).to(torch.bfloat16).clone())
            wanted -= count
            if wanted <= 0:
                break
    flat = torch.cat(parts).reshape(rows, hidden)
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def make_recording(folder: Path, out: Path, rows: int = ROWS, hidden: int = HIDDEN) -> str:
    """Record into ``out`` with a description beside it; returns the description."""
    data = record_rows(folder, rows, hidden)
    source = f"{rows} rows of {hidden} bf16, recorded from {folder.name} and widened"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)
    out.with_suffix(".txt").write_text(source + "\n", encoding="utf-8")
    return source


def source_of(recording: Path) -> str:
    """Description beside a recording."""
    note = recording.with_suffix(".txt")
    return note.read_text(encoding="utf-8").strip() if note.is_file() else "of an unknown model"


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--out", type=Path, default=RECORDED)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    options = parser.parse_args()
    source = make_recording(options.model, options.out, options.rows, options.hidden)
    print(f"{options.out}: {source}")


if __name__ == "__main__":
    main()
