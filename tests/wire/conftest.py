"""Strategies for every message of a registry."""

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import inspect

from molink.facts.profile import Profile


def _ascending(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    """In ascending order, as profiles require."""
    return tuple(sorted(dict(points).items()))


def _strategy(kind: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: C901  a case per type
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            parts = {field.name: _strategy(field.type) for field in fields}
            if cls is Profile:
                parts |= {name: parts[name].map(_ascending) for name in ("decode", "prefill")}
            return st.fixed_dictionaries(parts).map(lambda values: cls(**values))
        case inspect.UnionType(types=types):
            return st.one_of([_strategy(each) for each in types])
        case inspect.IntType(ge=low, gt=above, le=high, lt=below):
            minimum = low if low is not None or above is None else above + 1
            maximum = high if high is not None or below is None else below - 1
            return st.integers(minimum, maximum)
        case inspect.FloatType(ge=low, gt=above, le=high):
            minimum = low if low is not None else above
            return st.floats(
                minimum, high, exclude_min=above is not None, allow_nan=False, allow_infinity=False
            )
        case inspect.StrType(max_length=maximum, pattern=None, min_length=minimum):
            return st.text("aä☃-.", min_size=minimum or 0, max_size=min(maximum or 8, 40))
        case inspect.StrType(pattern=pattern):
            return st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) < 128)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType(item_type=item, min_length=minimum, max_length=maximum):
            few = min(maximum if maximum is not None else 4, 4)
            return st.lists(_strategy(item), min_size=minimum or 0, max_size=few).map(tuple)
        case inspect.DictType(key_type=key, value_type=value, max_length=maximum):
            few = min(maximum if maximum is not None else 3, 3)
            return st.dictionaries(_strategy(key), _strategy(value), max_size=few)
        case inspect.TupleType(item_types=items):
            return st.tuples(*(_strategy(item) for item in items))
        case inspect.BytesType(min_length=minimum, max_length=maximum):
            return st.binary(min_size=minimum or 0, max_size=maximum)
        case inspect.Metadata(type=inner):
            return _strategy(inner)
    raise NotImplementedError(kind)


@pytest.fixture(scope="session")
def messages() -> Any:
    """``messages(union)``: a list of (class, strategy) of every message of a registry."""

    def make(union: Any) -> list[tuple[type[msgspec.Struct], st.SearchStrategy[Any]]]:
        kind = inspect.type_info(union)
        assert isinstance(kind, inspect.UnionType)
        return [(each.cls, _strategy(each)) for each in kind.types]

    return make
