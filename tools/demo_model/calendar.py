"""Days, months, planets and other things that come in an order, as topics."""

from __future__ import annotations

from itertools import pairwise

from tools.demo_model.topic import Topic, rows, wordings

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

MONTH_DAYS = ("31", "28", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")

PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")

ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth"),
    *("seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"),
)

_RIDDLES = rows(
    "riddle planet",
    """the largest planet|Jupiter; the biggest planet|Jupiter; the smallest planet|Mercury
the red planet|Mars; the hottest planet|Venus; the planet with the big rings|Saturn
the planet with rings|Saturn; the planet we live on|Earth
the planet closest to the sun|Mercury; the planet farthest from the sun|Neptune
our planet|Earth""",
)


def _make_order(kind: str, names: tuple[str, ...], side: str) -> Topic:
    """What comes after each name, or before it, around the circle."""
    step = 1 if side == "after" else -1
    return Topic(
        f"{kind}_{side}",
        (
            f"What {kind} comes {side} {{name}}?",
            f"Which {kind} comes {side} {{name}}?",
            f"What {kind} is {side} {{name}}?",
            f"What comes {side} {{name}}?",
            f"Which {kind} is {side} {{name}}?",
            f"Tell me what {kind} comes {side} {{name}}.",
            f"Name the {kind} {side} {{name}}.",
        ),
        (f"{{found}} comes {side} {{name}}.",),
        tuple(
            {"name": name, "found": names[(i + step) % len(names)]} for i, name in enumerate(names)
        ),
        (f"And {side} {{name}}?", f"What about {side} {{name}}?"),
        held_out=(f"Tell me the {kind} that comes {side} {{name}}.",),
        keywords=("{found}",),
        weight=1.7,
    )


def _make_list(
    name: str, what: str, items: str, extra: tuple[str, ...] = (), key: str = ""
) -> Topic:
    return Topic(
        name,
        (
            f"List {what}.",
            f"Name {what}.",
            f"Tell me {what}.",
            f"What are {what}?",
            f"Say {what}.",
            *extra,
        ),
        (items,),
        held_out=(f"Can you list {what} for me?",),
        keywords=(key,) if key else (),
        weight=0.6,
    )


_ORDER = tuple(
    _make_order(kind, names, side)
    for kind, names in (("day", DAYS), ("month", MONTHS))
    for side in ("after", "before")
)

_MONTHS = (
    Topic(
        "month_length",
        wordings("""How many days does {month} have? | How many days are in {month}?
How many days are there in {month}? | How long is {month}?
Can you tell me how many days {month} has?"""),
        ("{month} has {days} days.",),
        tuple({"month": m, "days": d} for m, d in zip(MONTHS, MONTH_DAYS, strict=True)),
        ("And {month}?", "What about {month}?"),
        held_out=("Tell me how many days {month} has.",),
        keywords=("{days}",),
        weight=1.5,
    ),
    Topic(
        "month_number",
        wordings("""What is the {nth} month? | Which month is the {nth} month?
What is the {nth} month of the year? | Name the {nth} month of the year.
Which is the {nth} month? | Tell me which month is the {nth} one."""),
        ("The {nth} month of the year is {month}.",),
        tuple({"nth": n, "month": m} for n, m in zip(ORDINALS, MONTHS, strict=True)),
        ("And the {nth}?", "What about the {nth} one?"),
        held_out=("Tell me the {nth} month.",),
        keywords=("{month}",),
        weight=1.5,
    ),
)

_SPACE = (
    Topic(
        "planet_number",
        wordings("""What is the {nth} planet? | Which planet is the {nth} from the sun?
What is the {nth} planet from the sun? | Name the {nth} planet.
Tell me which planet is the {nth} from the sun."""),
        ("The {nth} planet from the sun is {planet}.",),
        tuple({"nth": n, "planet": p} for n, p in zip(ORDINALS, PLANETS, strict=False)),
        ("And the {nth}?", "What about the {nth} one?"),
        held_out=("Tell me the {nth} planet from the sun.",),
        keywords=("{planet}",),
        weight=1.5,
    ),
    Topic(
        "planet_after",
        ("Which planet comes after {one}?", "What planet is after {one}?"),
        ("{two} comes after {one}.",),
        tuple({"one": a, "two": b} for a, b in pairwise(PLANETS)),
        ("And after {one}?",),
        held_out=("What planet comes after {one}?",),
        keywords=("{two}",),
    ),
    Topic(
        "planet_known",
        wordings("""What is {riddle}? | Which is {riddle}? | Do you know {riddle}?
Tell me what {riddle} is called. | What is {riddle} called?"""),
        ("That is {planet}.", "{planet} is {riddle}."),
        _RIDDLES,
        ("And {riddle}?", "And which is {riddle}?"),
        held_out=("Tell me which is {riddle}.",),
        keywords=("{planet}",),
        weight=1.5,
    ),
)

_LISTS = (
    _make_list(
        "days",
        "the days of the week",
        "The days of the week are " + ", ".join(DAYS[:-1]) + " and Sunday.",
        key="Thursday",
    ),
    _make_list(
        "months",
        "the months of the year",
        "The months of the year are " + ", ".join(MONTHS[:-1]) + " and December.",
        ("List all months.",),
        key="September",
    ),
    _make_list(
        "planets",
        "the planets",
        "The planets are " + ", ".join(PLANETS[:-1]) + " and Neptune.",
        ("List the planets of the solar system.",),
        key="Saturn",
    ),
    _make_list(
        "seasons",
        "the seasons",
        "The four seasons are spring, summer, autumn and winter.",
        key="autumn",
    ),
    _make_list(
        "rainbow",
        "the colours of the rainbow",
        "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
        ("What colours does a rainbow have?",),
        key="violet",
    ),
    _make_list(
        "continents",
        "the continents",
        "The continents are Africa, Antarctica, Asia, Australia, Europe, North America"
        " and South America.",
        key="Europe",
    ),
    _make_list(
        "alphabet",
        "the letters of the alphabet",
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
        ("Say the alphabet.", "Recite the alphabet."),
        key="Q, R, S",
    ),
)


def topics() -> list[Topic]:
    """All topics about things in order."""
    return [*_ORDER, *_MONTHS, *_SPACE, *_LISTS]
