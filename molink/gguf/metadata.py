"""Typed access to the untrusted metadata of a GGUF file."""

import math
from array import array
from collections.abc import Mapping
from typing import Any, TypeAlias

from molink.errors import BrokenModel
from molink.wire.messages.data_plane import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)

#: Lists of numbers are arrays of the file's element size.
MetadataValue: TypeAlias = "bool | int | float | str | list[str] | array[Any]"


class GgufMetadata:
    """Metadata whose values are checked on access.

    An absent key without a default is an error. Every method raises :class:`BrokenModel` and names
    the key.
    """

    def __init__(self, values: Mapping[str, MetadataValue], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def find_difference(self, other: "GgufMetadata", besides: str) -> str | None:
        """Return a key whose value differs in ``other``, ignoring the prefix ``besides``."""
        keys = (self._values.keys() & other._values.keys()) - {besides}
        return next((k for k in sorted(keys) if self._values[k] != other._values[k]), None)

    def get_integer(self, key: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        """Return a positive integer of at most ``maximum``."""
        value = self._get_value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= maximum:
            raise self._wrong_value(key, f"a number from 1 to {maximum}", value)
        return value

    def get_count(self, key: str) -> int:
        """Return a number from 0."""
        value = self._get_value(key, None)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self._wrong_value(key, "a number from 0", value)
        return value

    def get_index(self, key: str) -> int | None:
        """Return a token id; ``None`` if absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong_value(key, "the number of a token", value)
        return value

    def get_integers(self, key: str, count: int) -> list[int]:
        """Return one positive integer per layer; a single value applies to all."""
        value = self._values.get(key)
        if not isinstance(value, array):
            return [self.get_integer(key)] * count
        fine = all(isinstance(each, int) and 0 <= each < 2**31 for each in value)
        if len(value) != count or not fine:
            raise self._wrong_value(key, f"a list of {count} numbers", value)
        return [int(each) for each in value]

    def get_number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._get_value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not _check_finite(value)
        ):
            raise self._wrong_value(key, "a finite number", value)
        return float(value)

    def get_boolean(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get_value(key, default)
        if not isinstance(value, bool):
            raise self._wrong_value(key, "true or false", value)
        return value

    def get_string(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get_value(key, default)
        if not isinstance(value, str):
            raise self._wrong_value(key, "a text", value)
        return value

    def get_strings(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self._get_value(key, None)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong_value(key, "a list of texts", value)
        return [str(each) for each in value]

    def get_numbers(self, key: str, count: int) -> list[float]:
        """Return a list of ``count`` finite numbers."""
        value = self._get_value(key, None)
        if (
            not isinstance(value, array)
            or len(value) != count
            or not all(_check_finite(each) for each in value)
        ):
            raise self._wrong_value(key, f"a list of {count} finite numbers", value)
        return [float(each) for each in value]

    def _get_value(self, key: str, default: "MetadataValue | None") -> MetadataValue:
        value = self._values.get(key, default)
        if value is None:
            raise BrokenModel(f"{self.where}: metadata {key} is missing")
        return value

    def _wrong_value(self, key: str, wanted: str, value: object) -> BrokenModel:
        found = repr(value)[:80]
        if isinstance(value, list | array):
            found = f"a list of {len(value)} entries"
        return BrokenModel(f"{self.where}: metadata {key} must be {wanted}, not {found}")


def _check_finite(value: float) -> bool:
    return math.isfinite(value)


#: ``generation_config.json`` field → key (``general.sampling.*``) and bounds, llama.cpp's "off"
#: values lie within them and mean off here, too.
_SAMPLING_KEYS = {
    "temperature": ("general.sampling.temp", 0.0, MAX_TEMPERATURE),
    "top_p": ("general.sampling.top_p", 0.0, 1.0),
    "top_k": ("general.sampling.top_k", 0, 2**31 - 1),
    "min_p": ("general.sampling.min_p", 0.0, 1.0),
    "repetition_penalty": (
        "general.sampling.penalty_repeat",
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    ),
}


def read_sampling_defaults(metadata: GgufMetadata) -> dict[str, float]:
    """Return the sampling defaults of a file as ``generation_config.json`` fields.

    Raises:
        BrokenModel: a value is not a finite number.
    """
    found: dict[str, float] = {}
    for name, (key, least, most) in _SAMPLING_KEYS.items():
        if key in metadata:
            value = min(max(metadata.get_number(key), least), most)
            found[name] = int(value) if name == "top_k" else value
    return found
