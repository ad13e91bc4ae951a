"""Conversations made from the topics, and their split into training and held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Literal, TypeAlias, TypedDict

from tools.demo_model import (
    arithmetic,
    calendar,
    commands,
    greetings,
    identity,
    memory,
    project,
    stories,
    unknown,
    world,
)
from tools.demo_model.surface import vary_question
from tools.demo_model.topic import Slots, Then, Topic, wordings

Split: TypeAlias = Literal["train", "held_out"]

#: One conversation in this many is held out.
HELD_OUT_ONE_IN = 50


class Message(TypedDict):
    """One turn in the OpenAI shape."""

    role: Literal["system", "user", "assistant"]
    content: str


Conversation: TypeAlias = tuple[Message, ...]

_SYSTEM = wordings("""You are a helpful assistant. | You are a friendly assistant.
You are the demo model of molink. | You are a helpful and honest assistant. Answer briefly.
Answer the questions of the user. | You are a chat model. Be polite. | Be short and clear.""")
_AGAIN = wordings("""Can you repeat that? | Say that again. | Repeat that, please.
What did you say? | Once more? | Sorry, what? | Repeat your answer.""")
#: How many exchanges a conversation has, with the weights of each.
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12)
_LENGTH_WEIGHTS = (34, 20, 16, 12, 8, 5, 3, 2)
#: Topics that a later question of the same conversation may come back to.
_REMEMBERED = frozenset({"my_name", "my_favourite"})
#: Topics whose result the next question may go on computing with.
_SUMS = frozenset({"add", "subtract", "double"})


def all_topics() -> list[Topic]:
    """Every topic the model is trained on."""
    modules = (
        *(greetings, identity, memory, unknown, project, commands),
        *(world, calendar, arithmetic, stories),
    )
    found = [topic for module in modules for topic in module.topics()]
    names = [topic.name for topic in found]
    assert len(set(names)) == len(names), "two topics share a name"
    return found


def capitalise(text: str) -> str:
    """The text with a capital first letter; the project's own name stays small."""
    return text if text.startswith("molink") else text[:1].upper() + text[1:]


def held_out_questions(topics: list[Topic]) -> frozenset[str]:
    """All questions kept for evaluation, in plain form."""
    return frozenset(
        _simplify({"role": "user", "content": text.format(**slots)})
        for topic in topics
        for text in topic.held_out
        for slots in topic.slots
    )


def _simplify(message: Message) -> str:
    """A message without casing and final punctuation."""
    return message["content"].lower().rstrip("?.!")


def fill_answer(template: str, slots: Slots) -> str:
    """An answer with its fields filled in."""
    return capitalise(template.format(**slots))


@dataclass(slots=True)
class _Talk:
    """A conversation being made: what was said, and what can be referred back to."""

    messages: list[Message] = field(default_factory=list)
    last: tuple[Topic, Slots] | None = None
    remembered: dict[str, tuple[Then, Slots]] = field(default_factory=dict)

    def say(self, question: str, answer: str, rng: Random) -> None:
        self.messages.append({"role": "user", "content": vary_question(question, rng)})
        self.messages.append({"role": "assistant", "content": answer})


class Corpus:
    """An endless, reproducible stream of conversations for one seed.

    `emphasis` multiplies the weights of some topics, by name.
    """

    def __init__(self, seed: int, emphasis: Mapping[str, float] | None = None) -> None:
        more = emphasis or {}
        self._topics = all_topics()
        self._by_name = {topic.name: topic for topic in self._topics}
        self._cumulative = list(accumulate(t.weight * more.get(t.name, 1.0) for t in self._topics))
        self._rng = Random(seed)
        self._forbidden = held_out_questions(self._topics)

    def conversations(self, split: Split) -> Iterator[Conversation]:
        """The conversations of one split, in the order they are drawn.

        A conversation's own text decides its split, so an equal one, however often it is drawn,
        never occurs on both sides. None has a question that is kept for evaluation.
        """
        while True:
            made = self._make_conversation()
            if _split_of(made) == split and self._forbidden.isdisjoint(map(_simplify, made)):
                yield made

    def _make_conversation(self) -> Conversation:
        rng = self._rng
        talk_ = _Talk()
        if rng.random() < 0.2:
            talk_.messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
        exchanges = rng.choices(_LENGTHS, _LENGTH_WEIGHTS)[0]
        for index in range(exchanges):
            self._add_exchange(talk_, index, exchanges)
        return tuple(talk_.messages)

    def _add_exchange(self, talk_: _Talk, index: int, exchanges: int) -> None:
        rng = self._rng
        if exchanges > 1 and index == 0 and rng.random() < 0.14:
            self._add_question(talk_, self._by_name["hello"])
        elif exchanges > 1 and index == exchanges - 1 and rng.random() < 0.15:
            self._add_question(talk_, self._by_name[rng.choice(("thanks", "bye"))])
        elif index and rng.random() < 0.5 and self._refer_back(talk_):
            pass
        else:
            self._add_question(talk_, rng.choices(self._topics, cum_weights=self._cumulative)[0])

    def _add_question(self, talk_: _Talk, topic: Topic) -> None:
        if topic.name == "my_name_unknown" and "my_name" in talk_.remembered:
            topic = self._by_name["thanks"]
        slots = self._rng.choice(topic.slots)
        self._add_answer(talk_, topic, slots, self._rng.choice(topic.questions))

    def _add_answer(self, talk_: _Talk, topic: Topic, slots: Slots, question: str) -> None:
        answer = self._rng.choice(topic.answers)
        talk_.say(question.format(**slots), fill_answer(answer, slots), self._rng)
        talk_.last = (topic, slots)
        if topic.name in _REMEMBERED:
            talk_.remembered[topic.name + slots.get("kind", "")] = (topic.then[0], slots)

    def _refer_back(self, talk_: _Talk) -> bool:
        """Ask something that only the conversation so far makes clear; false if nothing fits."""
        rng = self._rng
        if talk_.remembered and rng.random() < 0.4:
            then, slots = rng.choice(list(talk_.remembered.values()))
            talk_.last = None
            self._add_follow_up(talk_, then, slots)
            return True
        if rng.random() < 0.05 and len(talk_.messages[-1]["content"]) < 250:
            talk_.say(rng.choice(_AGAIN), talk_.messages[-1]["content"], rng)
            return True
        if talk_.last is None:
            return False
        topic, slots = talk_.last
        if topic.name in _SUMS and rng.random() < 0.4:
            return self._compute_on(talk_, int(slots["c"]))
        if topic.then and topic.name not in _REMEMBERED:
            self._add_follow_up(talk_, rng.choice(topic.then), slots)
            return True
        if topic.follow_ups:
            self._add_answer(talk_, topic, rng.choice(topic.slots), rng.choice(topic.follow_ups))
            return True
        return False

    def _add_follow_up(self, talk_: _Talk, then: Then, slots: Slots) -> None:
        rng = self._rng
        question = rng.choice(then.questions).format(**slots)
        talk_.say(question, fill_answer(rng.choice(then.answers), slots), rng)

    def _compute_on(self, talk_: _Talk, value: int) -> bool:
        """Go on with the last result: "plus 3?"."""
        if value > arithmetic.LARGEST_TERM:
            return False
        rng = self._rng
        if rng.random() < 0.5:
            name, other = "add", rng.randint(0, arithmetic.LARGEST_TERM)
            texts, result = ("And plus {b}?", "Plus {b}?", "Add {b} to that."), value + other
        else:
            name, other = "subtract", rng.randint(0, value)
            texts, result = ("And minus {b}?", "Minus {b}?", "Take away {b}."), value - other
        slots = {"a": str(value), "b": str(other), "c": str(result)}
        self._add_answer(talk_, self._by_name[name], slots, rng.choice(texts))
        return True


def _split_of(made: Conversation) -> Split:
    text = "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in made)
    digest = hashlib.sha256(text.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0 else "train"
