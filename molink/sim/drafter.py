"""A draft model that computes nothing, takes its time, and guesses what was recorded."""

from collections.abc import Callable, Sequence

from molink.facts.drafts import DraftAsk, DraftOrder, Guess, Guesses
from molink.sim.agenda import Agenda
from molink.sim.pc import Pc
from molink.sim.roofline import Roofline, StepRows
from molink.sim.texts import KnownText


class SimDrafter:
    """All layers of a model on the first stage's device: what it does, the stage's steps wait for.

    Its guesses are those of the request's text, as many as were asked for and are likely enough.
    """

    def __init__(
        self, agenda: Agenda, roofline: Roofline, pc: Pc, texts: Sequence[KnownText]
    ) -> None:
        self._agenda = agenda
        self._roofline = roofline
        self._pc = pc
        self._texts = texts
        #: What it was told of each request.
        self._tokens: dict[int, list[int]] = {}

    def ask(self, order: DraftOrder, done: Callable[[Guesses], None]) -> None:
        """As :class:`molink.ring.stage.Guesser` says."""
        for number in order.over:
            self._tokens.pop(number, None)
        guesses = [self._guess(ask) for ask in order.asks]
        seconds = self._seconds(order.asks, guesses)
        wait = self._pc.begin(seconds, self._agenda.now)
        self._agenda.at(self._agenda.now + wait, done, Guesses(guesses, seconds * self._pc.slowed))

    def _guess(self, ask: DraftAsk) -> Guess:
        known = self._tokens.setdefault(ask.request, [])
        known[ask.known :] = ask.tokens
        text = next((text for text in self._texts if text.begins_with(known)), None)
        if not ask.wanted or text is None:
            return Guess(ask.request)
        tokens, chances = text.guessed(len(known))
        upto, chance = 0, 1.0
        while upto < min(ask.wanted, len(tokens)) and chance >= ask.least:
            chance *= chances[upto]
            upto += 1
        return Guess(ask.request, tokens[:upto], chances[:upto])

    def _seconds(self, asks: Sequence[DraftAsk], guesses: Sequence[Guess]) -> float:
        """A pass over what is new, and one more for each guess after the first."""
        if not asks:
            return 0.0
        new, before = sum(len(ask.tokens) for ask in asks), sum(ask.known for ask in asks)
        few = new <= 2 * len(asks)
        first = StepRows(
            decode=new if few else 0,
            decode_context=before if few else 0,
            prefill=0 if few else new,
            prefill_context=0 if few else new * before // len(asks),
            sampled=sum(ask.wanted > 0 for ask in asks),
        )
        seconds = self._roofline.step_s(first)
        for guessed in range(1, max(len(guess.tokens) for guess in guesses)):
            active = [a for a, g in zip(asks, guesses, strict=True) if len(g.tokens) > guessed]
            context = sum(ask.known for ask in active)
            rows = StepRows(decode=len(active), decode_context=context, sampled=len(active))
            seconds += self._roofline.step_s(rows)
        return seconds
