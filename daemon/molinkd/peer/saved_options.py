"""The options of a PC's last start: the next one begins with them, unless told otherwise."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from molink.errors import UsageError
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.settings import SECRET_SETTINGS

_Option = str | int | float | bool


def read_options(path: Path) -> dict[str, Any]:
    """What was given on the command line last, by setting; nothing if nothing was.

    Raises:
        UsageError: the file is there but can't be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Option | list[_Option]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} can't be read: {error}. Delete it and give your options again."
        ) from None


def write_options(path: Path, options: Mapping[str, Any]) -> None:
    """Remember them. An API key may be among them, so that only the owner may read the file."""
    write_secret(path, msgspec.json.encode(options).decode("utf-8"))


def format_options(options: Mapping[str, Any]) -> str:
    """The options as a person types them, but for secrets: ``--stage none --threads 2``."""
    return " ".join(
        f"--{name.replace('_', '-')} {'…' if name in SECRET_SETTINGS else one}"
        for name, value in options.items()
        for one in (value if isinstance(value, list) else [value])
    )
