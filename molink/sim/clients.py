"""Clients: they send requests when these are due, and note when each token comes."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from molink.bench.planned import PlannedRequest
from molink.bench.sample import Sample
from molink.errors import InvariantError, MolinkError
from molink.scheduler.head import Head
from molink.scheduler.request import Emission, HeadRequest
from molink.sim.agenda import Agenda
from molink.sim.texts import END, KnownText, tokens_of
from molink.wire.messages.data import Sampling
from molink.wire.messages.serving import Token

#: Uncredited tokens: clients that take everything at once never make a stream wait.
_WINDOW = 1 << 24
_OWNER = "clients"


class ServingRing(Protocol):
    """What takes requests: a ring."""

    @property
    def head(self) -> Head:
        """Where they are submitted."""

    def pump(self) -> None:
        """The head has a new one."""


#: Who is to serve a request now; ``None``: nobody is there, somebody will ask again.
Choose = Callable[[PlannedRequest], ServingRing | None]


class Clients:
    """Sends ``plan`` to the heads that ``choose`` names, and keeps the time of every token.

    ``agenda`` is stopped after the last one. It is the heads' front desk, too. Prompts have no
    content that could be shared, unless there are ``texts`` or a trace says what they share.
    """

    def __init__(
        self,
        agenda: Agenda,
        plan: Iterable[PlannedRequest],
        choose: Choose,
        texts: Sequence[KnownText] = (),
    ) -> None:
        self._agenda = agenda
        self._choose = choose
        self._texts = texts
        self._plan = {str(request.index): request for request in plan}
        self._times: dict[str, array[float]] = {key: array("d") for key in self._plan}
        self._errors: dict[str, str] = {}
        #: Who serves those that live; nobody those that wait.
        self._served: dict[str, ServingRing | None] = {}
        self.left = len(self._plan)
        #: When something last came of a request, or the first one of several was sent.
        self.heard_at = 0.0
        self._live_since = 0.0
        #: Seconds in which any request was being served.
        self.live_s = 0.0
        #: Told of each request that is over: who served it, its key, tokens of the answer, when.
        self.on_over: Callable[[ServingRing | None, str, int, float], None] | None = None
        #: Told of a request's first token, of how many prompt tokens were cached, and when.
        self.on_first: Callable[[str, int, float], None] | None = None

    def start(self) -> None:
        """Have every request sent when it is due."""
        for key, request in self._plan.items():
            self._agenda.at(request.at, self._begin, key)

    def _begin(self, key: str) -> None:
        now = self._agenda.now
        if not self._served:
            self._live_since = self.heard_at = now
        self._served[key] = None
        self._submit(key)

    def _submit(self, key: str) -> None:
        """Send the prompt, and what there is of the answer; the rest is to come."""
        planned, now = self._plan[key], self._agenda.now
        serving = self._served[key] = self._choose(planned)
        if serving is None:
            return
        there = len(self._times[key])
        count = planned.input_tokens
        request = HeadRequest(
            _OWNER,
            key,
            self._ids(planned, count + there),
            count,
            (planned.max_tokens or planned.output_tokens) - there,
            # What a stage samples, it knows by the seed.
            Sampling(temperature=0.0, seed=planned.index if self._texts else planned.last),
            () if self._texts else (END,),
            window=_WINDOW,
        )
        try:
            emissions = serving.head.submit(request, now)
        except MolinkError as error:
            self._over(key, now, str(error))
        else:
            self.deliver(emissions, now)
            serving.pump()

    def _ids(self, planned: PlannedRequest, count: int) -> tuple[int, ...]:
        """The first ``count`` tokens of prompt and answer."""
        if not self._texts:
            return tokens_of(planned, count)
        text = self._texts[planned.index % len(self._texts)]
        return (*text.prompt, *text.answer)[:count]

    def prompt(self, planned: PlannedRequest) -> tuple[int, ...]:
        """The tokens of a prompt."""
        return self._ids(planned, planned.input_tokens)

    def forsake(self, serving: ServingRing) -> list[str]:
        """It is gone: those that it served wait, and can be sent again; returns their keys."""
        lost = [key for key, other in self._served.items() if other is serving]
        for key in lost:
            self._served[key] = None
        return lost

    def resend(self, keys: Iterable[str]) -> None:
        """Send those again that wait."""
        for key in keys:
            if key in self._served and self._served[key] is None:
                self._submit(key)

    @property
    def waiting(self) -> list[str]:
        """Keys of those that nobody serves."""
        return [key for key, serving in self._served.items() if serving is None]

    @property
    def waiting_s(self) -> float:
        """Seconds for which requests have been served without anything coming of it."""
        return self._agenda.now - self.heard_at if self._served else 0.0

    # --- the heads' front desk -------------------------------------------------------------------

    def deliver(self, emissions: Iterable[Emission], now: float) -> None:
        """Take tokens and refusals.

        Raises:
            InvariantError: a token came twice, another one came, or one is missing before it.
        """
        self.heard_at = now
        for emission in emissions:
            message = emission.message
            if isinstance(message, Token):
                times = self._times[message.key]
                if message.position != self._plan[message.key].input_tokens + len(times):
                    raise InvariantError(f"request {message.key}: position {message.position}")
                if self._texts and message.token != self._due(message):
                    raise InvariantError(f"request {message.key}: another token came")
                times.append(now)
                if self.on_first is not None and len(times) == 1:
                    self.on_first(message.key, message.cached, now)
                if message.finish is not None:
                    self._over(message.key, now)
            else:
                self._over(message.key, now, message.message)

    def _due(self, message: Token) -> int:
        text = self._texts[self._plan[message.key].index % len(self._texts)]
        return text.token(message.position)

    def close(self) -> None:
        """A ring has ended: nothing more comes of it."""

    def _over(self, key: str, now: float, error: str | None = None) -> None:
        self.left -= 1
        serving = self._served.pop(key)
        if not self._served:
            self.live_s += now - self._live_since
        if error is not None:
            self._errors[key] = error
        if self.on_over is not None:
            self.on_over(serving, key, len(self._times[key]), now)
        if self.left == 0:
            self._agenda.stop()

    # --- what was measured -----------------------------------------------------------------------

    def samples(self, since: float) -> list[Sample]:
        """What the requests that were due at ``since`` or later measured."""
        return [
            self._sample(key, request) for key, request in self._plan.items() if request.at >= since
        ]

    def _sample(self, key: str, request: PlannedRequest) -> Sample:
        times = tuple(self._times[key])
        error = self._errors.get(key)
        if error is None and len(times) != request.output_tokens:
            error = f"{len(times)} of {request.output_tokens} tokens when the simulation ended"
        return Sample(
            request.at,
            times,
            times[-1] if times else request.at,
            request.input_tokens,
            len(times),
            error,
        )
