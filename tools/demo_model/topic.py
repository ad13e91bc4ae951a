"""A topic: wordings of one question, its answers, and held-out wordings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Slots = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Then:
    """A follow-up that makes sense only right after the topic: "Why?", "Tell me more"."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    """One question. All texts may hold ``{slot}`` fields.

    `held_out` wordings are never trained on. Each keyword must occur in their answers; ``a|b``
    accepts either.
    """

    name: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    slots: tuple[Slots, ...] = ({},)
    #: Elliptical questions that ask the same of other slots: "And of {country}?"
    follow_ups: tuple[str, ...] = ()
    then: tuple[Then, ...] = ()
    held_out: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    #: Relative frequency among all topics.
    weight: float = 1.0


def rows(names: str, table: str) -> tuple[Slots, ...]:
    """Slots from a text table: rows end at ``;`` or a line end, columns at ``|``."""
    keys = names.split()
    return tuple(
        dict(zip(keys, (cell.strip() for cell in row.split("|")), strict=True))
        for row in re.split(r"[;\n]", table.strip())
    )


def wordings(text: str) -> tuple[str, ...]:
    """Texts that are separated by `` | `` or a line end."""
    return tuple(part.strip() for part in re.split(r"\s\|\s|\n", text.strip())) if text else ()


def plain(
    name: str,
    questions: str,
    answers: str | tuple[str, ...],
    held_out: str = "",
    keywords: tuple[str, ...] = (),
    then: tuple[Then, ...] = (),
    weight: float = 1.0,
) -> Topic:
    """A topic without slots; its questions are separated as for :func:`wordings`."""
    return Topic(
        name,
        wordings(questions),
        (answers,) if isinstance(answers, str) else answers,
        then=then,
        held_out=wordings(held_out),
        keywords=keywords,
        weight=weight,
    )
