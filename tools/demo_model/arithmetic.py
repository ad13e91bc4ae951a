"""Sums with small numbers, and counting, as topics.

Every pair in range is a slot, so training sees all of them; answers repeat the sum, which lets
the model compute from a fixed form whatever the wording was.
"""

from __future__ import annotations

from tools.demo_model.topic import Slots, Topic, wordings

#: Largest operand of additions and subtractions, of multiplications, and of next and previous.
LARGEST_TERM, LARGEST_FACTOR, LARGEST_NEXT = 20, 12, 100

_ASK = wordings("""What is {a} {op} {b}? | What's {a} {op} {b}? | {a} {op} {b} | {a} {op} {b}?
{a} {op} {b} = | How much is {a} {op} {b}? | Calculate {a} {op} {b}. | Compute {a} {op} {b}.
Tell me what {a} {op} {b} is. | What does {a} {op} {b} make? | Can you compute {a} {op} {b}?
Do you know what {a} {op} {b} is? | What is the answer to {a} {op} {b}?
How much does {a} {op} {b} make?""")
_HELD_OUT = ("Do you know how much {a} {op} {b} is?", "What is the result of {a} {op} {b}?")


def _expand_operators(texts: tuple[str, ...], operators: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.replace("{op}", op) for text in texts for op in operators)


def _make_slots(a: int, b: int, result: int) -> Slots:
    return {"a": str(a), "b": str(b), "c": str(result)}


def additions() -> tuple[Slots, ...]:
    """All sums of two numbers up to the largest term."""
    numbers = range(LARGEST_TERM + 1)
    return tuple(_make_slots(a, b, a + b) for a in numbers for b in numbers)


def subtractions() -> tuple[Slots, ...]:
    """All differences within the same range that are not negative."""
    return tuple(_make_slots(a, b, a - b) for a in range(LARGEST_TERM + 1) for b in range(a + 1))


def products() -> tuple[Slots, ...]:
    """The multiplication table."""
    numbers = range(LARGEST_FACTOR + 1)
    return tuple(_make_slots(a, b, a * b) for a in numbers for b in numbers)


_TABLES = (
    Topic(
        "add",
        (
            *_expand_operators(_ASK, ("+", "plus")),
            "Add {a} and {b}.",
            "What is the sum of {a} and {b}?",
        ),
        ("{a} + {b} = {c}.",),
        additions(),
        ("And {a} + {b}?", "And {a} plus {b}?", "What about {a} + {b}?"),
        held_out=_expand_operators(_HELD_OUT, ("+", "plus")),
        keywords=("= {c}.",),
        weight=64,
    ),
    Topic(
        "subtract",
        (*_expand_operators(_ASK, ("-", "minus")), "Subtract {b} from {a}.", "Take {b} from {a}."),
        ("{a} - {b} = {c}.",),
        subtractions(),
        ("And {a} - {b}?", "And {a} minus {b}?", "What about {a} - {b}?"),
        held_out=_expand_operators(_HELD_OUT, ("-", "minus")),
        keywords=("= {c}.",),
        weight=38,
    ),
    Topic(
        "multiply",
        (
            *_expand_operators(_ASK, ("*", "times", "x")),
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}.",
        ),
        ("{a} x {b} = {c}.",),
        products(),
        ("And {a} times {b}?", "And {a} x {b}?", "What about {a} * {b}?"),
        held_out=_expand_operators(_HELD_OUT, ("*", "times")),
        keywords=("= {c}.",),
        weight=36,
    ),
    Topic(
        "double",
        wordings("""Double {a}. | What is double {a}? | What is twice {a}?
What is the double of {a}?"""),
        ("2 x {a} = {c}.",),
        tuple(_make_slots(a, a, 2 * a) for a in range(LARGEST_TERM + 1)),
        ("And double {a}?", "And of {a}?"),
        held_out=("How much is double {a}?",),
        keywords=("= {c}.",),
        weight=3,
    ),
)


def _too_large() -> Topic:
    pairs = tuple(_make_slots(21 + (i * 37) % 979, 21 + (i * 211) % 979, 0) for i in range(400))
    return Topic(
        "too_large",
        _expand_operators(_ASK, ("+", "plus", "-", "minus", "*", "times")),
        ("That is too large for me: I only know sums with small numbers.",),
        pairs,
        held_out=_expand_operators(_HELD_OUT[:1], ("+", "times")),
        keywords=("too large",),
        weight=3,
    )


_ORDER = (
    Topic(
        "half",
        wordings("""What is half of {a}? | Half of {a}? | Halve {a}. | Tell me half of {a}.
What is the half of {a}? | How much is half of {a}?"""),
        ("Half of {a} is {b}.",),
        tuple({"a": str(2 * n), "b": str(n)} for n in range(LARGEST_TERM + 1)),
        ("And of {a}?", "And half of {a}?"),
        held_out=("Tell me the half of {a}.",),
        keywords=("is {b}.",),
        weight=2,
    ),
    Topic(
        "next_number",
        wordings("""What number comes after {a}? | Which number is after {a}?
What comes after {a}? | What is the next number after {a}?
Tell me which number comes after {a}. | Name the number after {a}."""),
        ("{b} comes after {a}.",),
        tuple({"a": str(n), "b": str(n + 1)} for n in range(LARGEST_NEXT + 1)),
        ("And after {a}?",),
        held_out=("Tell me the number after {a}.",),
        keywords=("{b} comes",),
        weight=3,
    ),
    Topic(
        "larger",
        wordings("""Which is larger, {a} or {b}? | Tell me which is more, {a} or {b}?
Which is bigger, {a} or {b}? | What is more, {a} or {b}? | Is {a} bigger than {b}?
Is {a} smaller than {b}?"""),
        ("{c} is larger than {d}.",),
        tuple(
            {"a": str(a), "b": str(b), "c": str(max(a, b)), "d": str(min(a, b))}
            for a in range(LARGEST_TERM + 1)
            for b in range(LARGEST_TERM + 1)
            if a != b
        ),
        ("And {a} or {b}?",),
        held_out=("Tell me which is larger, {a} or {b}?",),
        keywords=("{c} is larger",),
        weight=3,
    ),
)


def _run(first: int, last: int) -> Slots:
    """The numbers from the first to the last one, up or down."""
    step = 1 if last >= first else -1
    numbers = range(first, last + step, step)
    return {"a": str(first), "b": str(last), "c": ", ".join(map(str, numbers))}


_UP = [_run(1, last) for last in (3, 5, 7, 8, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 50)]
_UP += [_run(first, first + 10) for first in range(0, 90, 5)]
_DOWN = [_run(first, 1) for first in (3, 5, 10, 10, 15, 20, 30)]
_COUNTING = (
    Topic(
        "count",
        wordings("""Count from {a} to {b}. | Count from {a} up to {b}.
Please count from {a} to {b} | List the numbers from {a} to {b}.
Say the numbers from {a} to {b}."""),
        ("{c}.",),
        tuple(_UP),
        held_out=("Can you count from {a} to {b} for me?",),
        keywords=("{c}.",),
        weight=1.8,
    ),
    Topic(
        "count_to",
        wordings("""Count to {b}. | Say the numbers up to {b}. | List the numbers up to {b}.
Count up to {b}. | Can you count to {b}?"""),
        ("{c}.",),
        tuple(_UP[:15]),
        held_out=("Tell me the numbers up to {b}.",),
        keywords=("{c}.",),
        weight=0.7,
    ),
    Topic(
        "count_down",
        wordings("""Count down from {a} to 1. | Count down from {a}.
Count backwards from {a}. | Count from {a} down to 1. | Count from {a} to 1."""),
        ("{c}.",),
        tuple(_DOWN),
        held_out=("Can you count backwards from {a} to 1?",),
        keywords=("{c}.",),
        weight=0.8,
    ),
)


def topics() -> list[Topic]:
    """All topics about numbers."""
    return [*_TABLES, _too_large(), *_ORDER, *_COUNTING]
