"""Vary a question: casing, punctuation, politeness, typing errors."""

from __future__ import annotations

from random import Random

_OPENINGS = (
    "Please ",
    "Hey, ",
    "Hi, ",
    "Hello! ",
    "Hello, ",
    "Ok, ",
    "So, ",
    "Well, ",
    "Now ",
    "Tell me, ",
    "Tell me: ",
    "I have a question: ",
    "Excuse me, ",
    "One more question: ",
    "Next question: ",
)
_CLOSINGS = (" please", ", please", " Thanks!", ", thanks", " Thank you.", " for me", ", model")


#: Verbs that open a request, and polite ways to make one.
_REQUESTS = frozenset(
    {
        *("Tell", "List", "Name", "Count", "Say", "Explain", "Describe", "Write", "Translate"),
        *("Calculate", "Compute", "Add", "Subtract", "Take", "Multiply", "Double", "Halve", "Mix"),
        *("Repeat", "Show", "Give", "Recite", "Define", "Introduce", "Make"),
    }
)
_POLITE = ("Could you ", "Would you ", "Can you please ", "I want you to ", "You should ")


def vary_question(question: str, rng: Random) -> str:
    """Return one variation; about half change little."""
    text = question
    if text.split(" ")[0] in _REQUESTS and rng.random() < 0.3:
        text = rng.choice(_POLITE) + text[:1].lower() + text[1:]
    elif rng.random() < 0.12:
        opening = rng.choice(_OPENINGS)
        keep = text.startswith(("molink", "I ", "I'")) or opening.endswith("! ")
        text = opening + (text if keep else text[:1].lower() + text[1:])
    if rng.random() < 0.08:
        end = text[-1] if text[-1] in "?.!" else ""
        closing = rng.choice(_CLOSINGS)
        body = text.removesuffix(end)
        text = f"{text}{closing}" if closing.endswith(("!", ".")) else f"{body}{closing}{end}"
    return _vary_case(_vary_punctuation(text, rng), rng)


def _vary_punctuation(text: str, rng: Random) -> str:
    draw = rng.random()
    if draw < 0.22:
        return text.rstrip("?.!")
    if draw < 0.25:
        return text + text[-1] if text[-1] in "?!" else text.rstrip(".") + "!"
    if draw < 0.28:
        return _make_typo(text, rng)
    return text


def _vary_case(text: str, rng: Random) -> str:
    draw = rng.random()
    if draw < 0.22:
        return text.lower()
    if draw < 0.235:
        return text.upper()
    if draw < 0.27:
        return text[:1].lower() + text[1:]
    return text


def _make_typo(text: str, rng: Random) -> str:
    """Drop one letter or swap two inside a longer word; numbers and short words stay whole."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if not long:
        return text
    at = rng.choice(long)
    word, spot = words[at], rng.randrange(1, len(words[at]) - 2)
    if rng.random() < 0.5:
        words[at] = word[:spot] + word[spot + 1 :]
    else:
        words[at] = word[:spot] + word[spot + 1] + word[spot] + word[spot + 2 :]
    return " ".join(words)
