"""Typed access to the fields of a JSON object that may hold anything."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molink.errors import BrokenModel

#: A JSON file of a model folder that is longer is no such file.
MAX_JSON_BYTES = 64 * 1024 * 1024


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder.

    Raises:
        BrokenModel: the file is missing, unreadable, too long or no JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BrokenModel(f"{path}: longer than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModel(f"{path.name} is missing in the model folder {path.parent}") from None
    except OSError as error:
        raise BrokenModel(f"{path}: can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: a JSON object was expected")
    return value


class Fields:
    """A JSON object whose values are checked when they are asked for.

    Absent and ``null`` are the same, as in Hugging Face's configs; without a default either is an
    error. Every method raises :class:`BrokenModel` and names the field.
    """

    __slots__ = ("_raw", "where")

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where

    def _value(self, name: str, default: object) -> Any:
        value = self._raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise BrokenModel(f"{self.where}: {name} is missing")
        return value

    def _wrong(self, name: str, wanted: str, value: object) -> BrokenModel:
        return BrokenModel(f"{self.where}: {name} has to be {wanted}, not {value!r}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer below 2**31."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._wrong(name, "a positive integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if not math.isfinite(value):
            raise self._wrong(name, "a finite number", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number, or ``None`` where there is none."""
        return None if self._raw.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """An integer or a list of them, none if absent."""
        value = self._raw.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31:
                raise self._wrong(name, "an id or a list of ids", value)
        return tuple(values)
