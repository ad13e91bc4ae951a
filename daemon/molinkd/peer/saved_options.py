"""Options of the last start, which are the defaults of the next one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from molink.errors import UsageError
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.settings import SECRET_SETTINGS

_Option = str | int | float | bool


def read_options(path: Path) -> dict[str, Any]:
    """The saved options by setting; empty if there are none.

    Raises:
        UsageError: The file can't be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Option | list[_Option]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} can't be read: {error}. Delete it and pass your options again."
        ) from None


def write_options(path: Path, options: Mapping[str, Any]) -> None:
    """Save options. They may contain an API key, so only the owner may read the file."""
    write_secret(path, msgspec.json.encode(options).decode("utf-8"))


def format_options(options: Mapping[str, Any]) -> str:
    """Options as typed, with secrets hidden: ``--stage none --threads 2``."""
    return " ".join(
        f"--{name.replace('_', '-')} {'…' if name in SECRET_SETTINGS else one}"
        for name, value in options.items()
        for one in (value if isinstance(value, list) else [value])
    )
