"""Models in shards of one layer each, and PCs that fetch them."""

import json
import re
import struct
from pathlib import Path

from molink.checkpoint.model_folder import INDEX_FILE, scan_tensors

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_shards(folder: Path, *, only: bool = False) -> Path:
    """Split the weights of a model: a shard for each layer, and one for its ends.

    Or an ``only`` file.
    """
    tensors = scan_tensors(folder)
    groups: dict[int, list[str]] = {}
    for name in tensors:
        found = _LAYER.match(name)
        groups.setdefault(int(found[1]) + 1 if found and not only else 0, []).append(name)
    data = {
        name: (folder / span.file).read_bytes()[span.offset :][: span.nbytes]
        for name, span in tensors.items()
    }
    for path in folder.glob("*.safetensors"):
        path.unlink()
    placed = {}
    for number, names in sorted(groups.items()):
        file = shard_name(number, len(groups))
        header: dict[str, object] = {}
        end = 0
        for name in names:
            span = tensors[name]
            offsets = [end, end + span.nbytes]
            header[name] = {"dtype": span.dtype, "shape": span.shape, "data_offsets": offsets}
            end += span.nbytes
            placed[name] = file
        text = json.dumps(header).encode()
        body = b"".join(data[name] for name in names)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + body)
    index = {"metadata": {}, "weight_map": placed}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return folder


def shard_name(number: int, count: int) -> str:
    """That of the ends for 0, else of layer ``number - 1``."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
