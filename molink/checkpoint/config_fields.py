"""Typed access to the fields of an untrusted JSON object."""

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molink.errors import BrokenModel

#: Maximum size of a JSON file in a model folder.
MAX_JSON_BYTES = 64 * 1024 * 1024


def read_bytes(path: Path) -> bytes:
    """Read a file of a model folder, at most ``MAX_JSON_BYTES``.

    Raises:
        BrokenModel: the file is missing, unreadable, too long, or not a regular file.
    """
    try:
        refuse_irregular(path)
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise BrokenModel(f"{path.name} is missing in the model folder {path.parent}") from None
    except OSError as error:
        raise BrokenModel(f"{path}: can't be read: {error.strerror or error}") from error
    if len(data) > MAX_JSON_BYTES:
        raise BrokenModel(f"{path}: longer than {MAX_JSON_BYTES} bytes")
    return data


def describe_version(path: Path) -> str:
    """Size and time of a file, which change with its content.

    Raises:
        BrokenModel: the file is missing or inaccessible.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise BrokenModel(f"{path}: can't be read: {error.strerror or error}") from error
    return f"{found.st_size} {found.st_mtime_ns}"


def refuse_irregular(path: Path) -> None:
    """Refuse pipes and devices, which could block forever; links are followed.

    Raises:
        BrokenModel: ``path`` exists but is not a regular file.
        OSError: ``path`` is missing or inaccessible.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise BrokenModel(f"{path} is not a regular file; fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder.

    Raises:
        BrokenModel: the file is missing, unreadable, too long, or not a JSON object.
    """
    try:
        value = json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: expected a JSON object")
    return value


class ConfigFields:
    """A JSON object whose values are checked on access.

    As in Hugging Face's configs, ``null`` means absent; an absent field without a default is an
    error. Every method raises :class:`BrokenModel` and names the field.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where

    def _get_value(self, name: str, default: object) -> Any:
        value = self._raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise BrokenModel(f"{self.where}: {name} is missing")
        return value

    def _wrong_value(self, name: str, wanted: str, value: object) -> BrokenModel:
        return BrokenModel(f"{self.where}: {name} must be {wanted}, not {repr(value)[:80]}")

    def get_value(self, name: str) -> Any:
        """Return a value of any type, unchecked; ``None`` if absent."""
        return self._raw.get(name)

    def get_integer(self, name: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        """Return a positive integer of at most ``maximum``."""
        value = self._get_value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong_value(name, "a positive integer", value)
        if value > maximum:
            raise self._wrong_value(name, f"at most {maximum}", value)
        return value

    def get_count(self, name: str, default: int, maximum: int = 2**31 - 1) -> int:
        """Return an integer from 0 to ``maximum``."""
        value = self._get_value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
            raise self._wrong_value(name, f"an integer from 0 to {maximum}", value)
        return value

    def get_positive(self, name: str, default: float = 1.0) -> float:
        """Return a positive number."""
        number = self.get_number(name, default)
        if number <= 0:
            raise BrokenModel(f"{self.where}: {name} must be positive, not {number}")
        return number

    def get_number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._get_value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_value(name, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong_value(name, "a finite number", value)
        return number

    def get_optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a finite number, or ``None`` for ``null``; ``default`` only if absent."""
        if name not in self._raw:
            return default
        return None if self._raw[name] is None else self.get_number(name)

    def get_optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return a positive integer, or ``None`` for ``null``; ``default`` only if absent."""
        if name not in self._raw:
            return default
        return None if self._raw[name] is None else self.get_integer(name)

    def get_numbers(self, name: str) -> tuple[float, ...]:
        """Return a non-empty list of finite numbers."""
        listed = self._get_value(name, None)
        if not isinstance(listed, list) or not listed:
            raise self._wrong_value(name, "a list of numbers", listed)
        return tuple(ConfigFields({name: item}, self.where).get_number(name) for item in listed)

    def get_object(self, name: str) -> dict[str, Any]:
        """Return a JSON object; empty if absent."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong_value(name, "an object", value)
        return value or {}

    def get_strings(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings; ``None`` if absent."""
        listed = self._raw.get(name)
        if listed is None:
            return None
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise self._wrong_value(name, "a list of strings", listed)
        return tuple(listed)

    def get_boolean(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get_value(name, default)
        if not isinstance(value, bool):
            raise self._wrong_value(name, "true or false", value)
        return value

    def get_string(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get_value(name, default)
        if not isinstance(value, str):
            raise self._wrong_value(name, "a string", value)
        return value

    def get_integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; a single one is wrapped, absence is an empty list."""
        value = self._raw.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31:
                raise self._wrong_value(name, "an id or a list of ids", value)
        return tuple(values)
