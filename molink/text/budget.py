"""How much a chat template may do: templates come with models, so they are strangers' programs."""

import re
import time
from collections.abc import Iterable, Mapping, Sized
from typing import Any

#: Characters (and list elements) that one rendering may produce, intermediate ones included.
MAX_PRODUCED = 48 * 2**20
#: CPU time in seconds that one rendering may take.
MAX_CPU_S = 2.0
#: Largest number that a template may pass to a function or a filter: widths, counts, ranges.
MAX_ARGUMENT = 100_000
MAX_INTEGER_BITS = 1024

#: A number of four digits, a nested replacement field, or a ``*`` width.
_WIDTH = re.compile(r"\d{4}|\{[^{}]*:[^{}]*\{|%[-#0 +]*\*|\.\*")


class TemplateTooCostly(Exception):
    """A template went beyond its budget; never leaves :mod:`molink.text`."""


class Budget:
    """Counts what one rendering produces, and its thread's CPU time.

    The clock is the thread's own, so a busy machine makes no innocent template fail.
    """

    def __init__(self, produced: int = MAX_PRODUCED, cpu_s: float = MAX_CPU_S) -> None:
        self._left = produced
        self._deadline = time.thread_time() + cpu_s

    def spend(self, amount: int) -> None:
        """Account for ``amount`` characters or elements that are about to exist.

        Raises:
            TemplateTooCostly: the budget or the time is used up.
        """
        self._left -= amount + 1
        if self._left < 0:
            raise TemplateTooCostly("its output or its intermediate values are too large")
        if time.thread_time() > self._deadline:
            raise TemplateTooCostly("it takes too long")

    def spend_on_copy(self, *values: object) -> None:
        """Account for shallow copies of ``values``."""
        self.spend(sum(map(size_of, values)))

    def spend_on_text(self, *values: object, times: int = 1) -> None:
        """Account for ``values`` written out as text, ``times`` over."""
        self.spend(times * sum(text_size(value, self._left) for value in values))

    def check_arguments(self, values: Iterable[Any]) -> None:
        """Refuse numbers that could only serve to blow something up."""
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
                raise TemplateTooCostly(f"it passes the number {value} to a function")

    def format(self, directives: str, values: Iterable[Any]) -> None:
        """Account for ``directives`` filled with ``values``; refuses huge or computed widths."""
        if _WIDTH.search(directives):
            raise TemplateTooCostly("it formats with a huge or computed width")
        values = tuple(values)
        self.check_arguments(values)
        times = directives.count("{") + directives.count("%")
        self.spend_on_text(directives)
        self.spend_on_text(*values, times=times)

    def binary(self, operator: str, left: Any, right: Any) -> None:
        """Account for ``left operator right`` before it is computed."""
        if isinstance(left, int) and isinstance(right, int):
            self._integers(operator, left, right)
        elif operator == "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                self.spend(size_of(sequence) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            self.format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            self.spend_on_copy(left, right)

    def _integers(self, operator: str, left: int, right: int) -> None:
        bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
        if bits > MAX_INTEGER_BITS:
            raise TemplateTooCostly("it computes a huge number")
        self.spend(0)


def size_of(value: object) -> int:
    """Characters of a string, elements of a container; 64 for anything else."""
    return len(value) if isinstance(value, Sized) else 64


def text_size(value: object, most: int) -> int:
    """Characters of ``value`` written out, about; stops counting beyond ``most``."""
    if isinstance(value, str):
        return len(value)
    total, left = 0, [value]
    while left and total <= most:
        item = left.pop()
        if isinstance(item, Mapping):
            left.extend(item.keys())
            left.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            left.extend(item)
        total += len(item) if isinstance(item, str) else 32
    return total
