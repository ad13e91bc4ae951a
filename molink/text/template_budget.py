"""Bounds the cost of rendering chat templates, which are untrusted programs."""

import re
import time
from collections.abc import Collection, ItemsView, Iterable, KeysView, Sized, ValuesView
from operator import attrgetter
from typing import Any

from jinja2.utils import Namespace

#: Maximum characters and list elements that a rendering may produce, including intermediate ones.
MAX_PRODUCED_CHARACTERS = 48 * 2**20
#: Maximum CPU seconds of a rendering.
MAX_CPU_S = 2.0
#: Largest number that a template may pass to a function or filter.
MAX_ARGUMENT = 100_000
MAX_INTEGER_BITS = 1024
#: Maximum nesting of a value.
MAX_DEPTH = 32
#: Maximum width of a format's field that ``_REFUSED_WIDTH`` accepts.
_MAX_WIDTH = 1000
#: Estimated characters of a non-string value, and of the indentation around an element.
_ELEMENT_CHARACTERS = 32

#: A four-digit number, a nested replacement field, or a ``*`` width.
_REFUSED_WIDTH = re.compile(r"\d{4}|\{[^{}]*:[^{}]*\{|%[-#0 +]*\*|\.\*")
_attributes = attrgetter("_Namespace__attrs")


class TemplateTooCostly(Exception):
    """A template exceeded its budget; never leaves :mod:`molink.text`."""


class TemplateBudget:
    """Counts a rendering's output and its CPU time.

    It uses the thread's CPU clock, so a busy machine does not fail templates.
    """

    def __init__(self, produced: int = MAX_PRODUCED_CHARACTERS, cpu_s: float = MAX_CPU_S) -> None:
        self._left = produced
        self._deadline = time.thread_time() + cpu_s

    def charge_amount(self, amount: int) -> None:
        """Charge ``amount`` characters or elements before they are created.

        Raises:
            TemplateTooCostly: the budget or the time is used up.
        """
        self._left -= amount + 1
        if self._left < 0:
            raise TemplateTooCostly("its output or intermediate values are too large")
        if time.thread_time() > self._deadline:
            raise TemplateTooCostly("it takes too long")

    def charge_copy(self, *values: object) -> None:
        """Charge shallow copies of ``values``."""
        self.charge_amount(sum(map(size_of, values)))

    def charge_text(self, *values: object, times: int = 1) -> None:
        """Charge ``values`` written out as text ``times`` times.

        Comparing and hashing cost the same. Shared values count each time: forty levels of doubling
        need almost no memory, but unbounded time.
        """
        self.charge_amount(times * sum(text_size(value, self._left) for value in values))

    def check_arguments(self, values: Iterable[Any]) -> None:
        """Refuse numbers that would create huge values."""
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
                raise TemplateTooCostly(f"it passes the number {value} to a function")

    def charge_format(self, directives: str, values: Iterable[Any]) -> None:
        """Charge ``directives`` filled with ``values``; refuses huge or computed widths."""
        if _REFUSED_WIDTH.search(directives):
            raise TemplateTooCostly("it formats with a huge or computed width")
        values = tuple(values)
        self.check_arguments(values)
        times = directives.count("{") + directives.count("%")
        self.charge_amount(len(directives) + times * _MAX_WIDTH)
        self.charge_text(*values, times=times)

    def charge_operator(self, operator: str, left: Any, right: Any) -> None:
        """Charge ``left operator right`` before it is computed."""
        if isinstance(left, int) and isinstance(right, int):
            self._charge_integers(operator, left, right)
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                self.charge_amount(size_of(sequence) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            self.charge_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            self.charge_copy(left, right)
        else:
            self.charge_text(left, right)

    def _charge_integers(self, operator: str, left: int, right: int) -> None:
        bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
        if bits > MAX_INTEGER_BITS:
            raise TemplateTooCostly("it computes a huge number")
        self.charge_amount(0)


def size_of(value: object) -> int:
    """Return the characters of a string or the elements of a container; 64 for other values."""
    return len(value) if isinstance(value, Sized) else 64


def text_size(value: object, max_size: int) -> int:
    """Estimate the characters of ``value`` written out; stops beyond ``max_size``.

    Raises:
        TemplateTooCostly: it is nested beyond ``MAX_DEPTH``.
    """
    if isinstance(value, str):
        return len(value)
    total, level = _ELEMENT_CHARACTERS, [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, str):
                total += len(item)
                continue
            parts = _elements_of(item)
            total += _ELEMENT_CHARACTERS * len(parts)
            if total > max_size:
                return total
            inner.extend(parts)
        if not inner:
            return total
        level = inner
    raise TemplateTooCostly(f"its values are nested deeper than {MAX_DEPTH} levels")


def _elements_of(value: object) -> Collection[object]:
    """Return the elements of a container."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Namespace):
        return list(_attributes(value).values())
    return value if isinstance(value, KeysView | ValuesView | ItemsView) else ()
