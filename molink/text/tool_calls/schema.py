"""Checks the properties of tools' JSON schemas on which templates and grammars depend."""

from collections.abc import Iterator
from typing import Any

#: Maximum nesting; templates allow 32 levels, including those around a schema.
MAX_SCHEMA_DEPTH = 24

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
#: Keywords that hold a schema, a list of schemas, or an object of schemas.
_SCHEMA_KEYWORDS = (
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
)
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
_OBJECT_KEYWORDS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_STRING_KEYWORDS = ("$ref", "description", "format", "pattern", "title")

#: Path of a problem (``.properties.x``), and its description.
SchemaProblem = tuple[str, str]


def find_schema_problem(schema: dict[str, Any]) -> SchemaProblem | None:
    """Find what is wrong with a function's parameters schema, if anything."""
    if schema.get("type", "object") != "object":
        return ".type", "parameters are an 'object'"
    if _find_deep_value(schema):
        return "", f"nested deeper than {MAX_SCHEMA_DEPTH} levels"
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            return path, "a schema is an object"
        problem = _check_keywords(value)
        if problem is not None:
            return path + problem[0], problem[1]
        waiting += [(path + step, inner) for step, inner in _inner_schemas(value)]
    return None


def _find_deep_value(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)


def _check_keywords(schema: dict[str, Any]) -> SchemaProblem | None:
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            return ".type", f"there is no type {str(kind)[:32]!r}"
    for name in _OBJECT_KEYWORDS:
        if not isinstance(schema.get(name, {}), dict):
            return f".{name}", "expected an object"
    for name in (*_LIST_KEYWORDS, "enum", "required"):
        if not isinstance(schema.get(name, []), list):
            return f".{name}", "expected a list"
    for name in _STRING_KEYWORDS:
        if not isinstance(schema.get(name, ""), str):
            return f".{name}", "expected a text"
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        return ".required", "expected names of properties"
    return None


def _inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SCHEMA_KEYWORDS:
        if name in schema:
            yield f".{name}", schema[name]
    for name in _LIST_KEYWORDS:
        for index, inner in enumerate(schema.get(name, ())):
            yield f".{name}[{index}]", inner
    for name in _OBJECT_KEYWORDS:
        for key, inner in schema.get(name, {}).items():
            yield f".{name}.{key[:64]}", inner
    items = schema.get("items", ())
    if isinstance(items, list | tuple):
        for index, inner in enumerate(items):
            yield f".items[{index}]", inner
    else:
        yield ".items", items
