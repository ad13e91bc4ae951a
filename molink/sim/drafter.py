"""A draft model that computes nothing, takes its time, and guesses what was recorded."""

from collections.abc import Callable, Sequence

from molink.facts.drafts import DraftBatch, DraftRequest, DraftResults, DraftTokens
from molink.sim.event_queue import EventQueue
from molink.sim.known_text import KnownText
from molink.sim.pc import SimPc
from molink.sim.roofline import Roofline, StepRows


class SimDrafter:
    """All layers of a model on the first stage's device: what it does, the stage's steps wait for.

    Its guesses are those of the request's text, as many as were asked for and are likely enough.
    """

    def __init__(
        self, event_queue: EventQueue, roofline: Roofline, pc: SimPc, texts: Sequence[KnownText]
    ) -> None:
        self._event_queue = event_queue
        self._roofline = roofline
        self._pc = pc
        self._texts = texts
        #: What it was told of each request.
        self._tokens: dict[int, list[int]] = {}

    def request_drafts(self, batch: DraftBatch, done: Callable[[DraftResults], None]) -> None:
        """As :class:`molink.ring.stage.DraftRunner` says."""
        for number in batch.finished:
            self._tokens.pop(number, None)
        drafts = [self._draft_tokens(request) for request in batch.requests]
        seconds = self._order_s(batch.requests, drafts)
        wait = self._pc.reserve_device(seconds, self._event_queue.now)
        self._event_queue.schedule_at(
            self._event_queue.now + wait, done, DraftResults(drafts, seconds * self._pc.slowdown)
        )

    def _draft_tokens(self, request: DraftRequest) -> DraftTokens:
        known = self._tokens.setdefault(request.request, [])
        known[request.position :] = request.tokens
        text = next((text for text in self._texts if text.has_prefix(known)), None)
        if not request.max_drafts or text is None:
            return DraftTokens(request.request)
        tokens, probabilities = text.model_drafts_at(len(known))
        upto, probability = 0, 1.0
        while (
            upto < min(request.max_drafts, len(tokens)) and probability >= request.min_probability
        ):
            probability *= probabilities[upto]
            upto += 1
        return DraftTokens(request.request, tokens[:upto], probabilities[:upto])

    def _order_s(self, requests: Sequence[DraftRequest], drafts: Sequence[DraftTokens]) -> float:
        """A pass over what is new, and one more for each guess after the first."""
        if not requests:
            return 0.0
        new, before = (
            sum(len(request.tokens) for request in requests),
            sum(request.position for request in requests),
        )
        few = new <= 2 * len(requests)
        first = StepRows(
            decode=new if few else 0,
            decode_context=before if few else 0,
            prefill=0 if few else new,
            prefill_context=0 if few else new * before // len(requests),
            sampled=sum(request.max_drafts > 0 for request in requests),
        )
        seconds = self._roofline.step_s(first)
        for guessed in range(1, max(len(guess.tokens) for guess in drafts)):
            active = [a for a, g in zip(requests, drafts, strict=True) if len(g.tokens) > guessed]
            context = sum(request.position for request in active)
            rows = StepRows(decode=len(active), decode_context=context, sampled=len(active))
            seconds += self._roofline.step_s(rows)
        return seconds
