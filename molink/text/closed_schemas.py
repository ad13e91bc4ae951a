"""Forbids keys that a JSON schema does not name.

JSON Schema lets an object have more keys than ``properties`` lists, and models then invent keys. As
in llama.cpp, Ollama and vLLM, further keys need ``additionalProperties``.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

from molink.errors import RequestError

#: Keywords with an object of schemas, and keywords with one or more schemas, for other values.
_SCHEMAS_BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
_SCHEMAS = ("additionalProperties", "contains", "items", "prefixItems")
#: Keywords with schemas for the same value.
_COMBINED = ("allOf", "anyOf", "oneOf")
#: Maximum schemas visited and names added: a short schema can combine millions.
_MAX_STEPS = 100_000

#: Ordered set of keyword (``properties``, ``patternProperties`` or ``required``) and name.
_Names = dict[tuple[str, str], None]
#: Entry of a set of names which says that the schema lists all keys; ``required`` alone does not
#: imply it.
_COMPLETE = ("", "")
#: Keyword of a combined schema, and its index in ``allOf`` (otherwise 0).
_Place = tuple[str, int]
_REFERENCE: _Place = ("$ref", 0)


def forbid_extra_keys(schema: Any) -> Any:
    """Return ``schema`` with ``additionalProperties: false`` added wherever it names keys.

    Objects that set ``additionalProperties`` keep it, and an object that names no keys may have
    any. Schemas that ``allOf``, ``anyOf``, ``oneOf`` or ``$ref`` combine may have each other's
    keys, except those of other alternatives; they stay unchanged if one that always applies sets
    ``additionalProperties``. A boolean ``unevaluatedProperties``, which llguidance refuses, is
    replaced if nothing is combined.

    Raises:
        RequestError: the schema is nested too deeply, or combines too many schemas.
    """
    try:
        return _SchemaCloser(schema).close_schema(schema, {})
    except RecursionError:
        raise RequestError("nested too deeply") from None


class _SchemaCloser:
    """Closes the objects of a schema; ``root`` resolves references."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps_left = _MAX_STEPS
        #: Names, by the id of a schema in ``root``.
        self._known_names: dict[int, _Names] = {}

    def close_schema(
        self, schema: Any, extra: _Names | None, copied: frozenset[str] = frozenset()
    ) -> Any:
        """Close ``schema``, which may also have the keys ``extra``; ``None`` leaves it open.

        Schemas of other values are always closed. ``copied`` are the references that led to this
        schema.
        """
        if not isinstance(schema, dict):
            return schema
        schema = _replace_unevaluated(schema)
        if extra is None or self._says_additional(schema):
            return self._close_inner(schema, {}, copied)
        parts: dict[_Place, list[_Names]] = {}
        for place, part in self._list_parts(schema):
            parts.setdefault(place, []).append(self._find_names(part))
        own = _own_names(schema) | extra
        places = [place for place in parts if any(_COMPLETE in names for names in parts[place])]
        if _REFERENCE in places and (_COMPLETE in own or len(places) > 1):
            # The referenced schema is closed on its own, so a combination needs a copy.
            reference = schema["$ref"]
            if reference in copied:
                return schema
            target = self._resolve_reference(reference)
            schema = {**schema, "allOf": [*schema.get("allOf", ()), target]}
            del schema["$ref"]
            return self.close_schema(schema, extra, copied | {reference})
        if places:
            extras = {}
            for place in places:
                others = (parts[other] for other in places if other != place)
                extras[place] = self._merge_names(own, *chain.from_iterable(others))
            return self._close_inner(schema, extras, copied)
        closed = self._close_inner(schema, {}, copied)
        names = self._merge_names(own, *chain.from_iterable(parts.values()))
        return _allow_only(closed, names) if _COMPLETE in names else closed

    def _close_inner(
        self, schema: dict[str, Any], extras: Mapping[_Place, _Names], copied: frozenset[str]
    ) -> dict[str, Any]:
        """Close inner schemas; close combined ones only if ``extras`` has an entry for them."""
        closed = dict(schema)
        for key in _SCHEMAS_BY_NAME:
            if isinstance(schema.get(key), dict):
                inner = schema[key].items()
                closed[key] = {name: self.close_schema(each, {}) for name, each in inner}
        for key in _SCHEMAS:
            value = schema.get(key)
            if isinstance(value, list):
                closed[key] = [self.close_schema(each, {}) for each in value]
            elif value is not None:
                closed[key] = self.close_schema(value, {})
        for key in _COMBINED:
            if isinstance(schema.get(key), list):
                closed[key] = []
        for place, part in self._list_parts(schema):
            if place != _REFERENCE:
                closed[place[0]].append(self.close_schema(part, extras.get(place), copied))
        return closed

    def _list_parts(self, schema: dict[str, Any]) -> list[tuple[_Place, Any]]:
        """Return the schemas that ``schema`` combines; alternatives share one place."""
        found = [
            ((key, index if key == "allOf" else 0), part)
            for key in _COMBINED
            if isinstance(schema.get(key), list)
            for index, part in enumerate(schema[key])
        ]
        if "$ref" in schema:
            found.append((_REFERENCE, self._resolve_reference(schema["$ref"])))
        return found

    def _find_names(self, schema: Any) -> _Names:
        """Return the names in a schema of ``root`` and in all schemas that it combines."""
        if not isinstance(schema, dict):
            return {}
        if id(schema) not in self._known_names:
            self._known_names[id(schema)] = {}  # a recursive reference adds no names to itself
            parts = [self._find_names(part) for _, part in self._list_parts(schema)]
            self._known_names[id(schema)] = self._merge_names(_own_names(schema), *parts)
        return self._known_names[id(schema)]

    def _merge_names(self, *sets: _Names) -> _Names:
        merged: _Names = {}
        for names in sets:
            self._count_steps(1 + len(names))
            merged |= names
        return merged

    def _says_additional(self, schema: Any) -> bool:
        """Whether ``schema``, or one that always applies with it, sets ``additionalProperties``."""
        if not isinstance(schema, dict):
            return False
        self._count_steps(1)
        return "additionalProperties" in schema or any(
            self._says_additional(_replace_unevaluated(part))
            for (key, _), part in self._list_parts(schema)
            if key in ("allOf", "$ref")
        )

    def _resolve_reference(self, reference: Any) -> Any:
        """Return the schema in ``root`` at a JSON pointer; ``None`` if there is none."""
        if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
            return None
        found = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = dict(zip(map(str, range(len(found))), found, strict=True))
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _count_steps(self, number: int) -> None:
        self._steps_left -= number
        if self._steps_left < 0:
            raise RequestError("combines too many schemas")


def _own_names(schema: dict[str, Any]) -> _Names:
    """Return the names in a schema's own keywords."""
    found: _Names = {}
    for key in ("properties", "patternProperties", "required"):
        names = schema.get(key)
        if isinstance(names, dict):
            found[_COMPLETE] = None
        if isinstance(names, dict | list):
            found |= {(key, name): None for name in names if isinstance(name, str)}
    return found


def _allow_only(schema: dict[str, Any], names: _Names) -> dict[str, Any]:
    """Add ``names`` to ``schema``, and forbid all others."""
    added: dict[str, dict[str, Any]] = {"properties": {}, "patternProperties": {}}
    for key, name in names:
        if (key, name) == _COMPLETE:
            continue
        added["patternProperties" if key == "patternProperties" else "properties"][name] = {}
    closed = {**schema, "additionalProperties": False}
    for key, schemas in added.items():
        if schemas:
            closed[key] = schemas | schema.get(key, {})
    return closed


def _replace_unevaluated(schema: Any) -> Any:
    """Replace a boolean ``unevaluatedProperties`` by ``additionalProperties``.

    Schemas that combine others are left unchanged.
    """
    if not isinstance(schema, dict) or any(key in schema for key in ("$ref", *_COMBINED)):
        return schema
    value = schema.get("unevaluatedProperties")
    if not isinstance(value, bool):
        return schema
    others = {key: each for key, each in schema.items() if key != "unevaluatedProperties"}
    return {"additionalProperties": value, **others}
