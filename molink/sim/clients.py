"""Clients at the head: they send requests when these are due, and note when each token comes."""

from collections.abc import Callable, Iterable

from molink.bench.planned import PlannedRequest
from molink.bench.sample import Sample
from molink.errors import MolinkError
from molink.head.head import Head
from molink.head.request import Emission, HeadRequest
from molink.sim.agenda import Agenda
from molink.wire.messages.data import Sampling, Token

_SAMPLING = Sampling(temperature=0.0)
#: Uncredited tokens: clients that take everything at once never make a stream wait.
_WINDOW = 1 << 24
_OWNER = "clients"


class Clients:
    """Sends ``plan`` to ``head`` and keeps the time of every token.

    ``agenda`` is stopped after the last one. It is the head's front desk, too. Prompts have no
    content that could be shared.
    """

    def __init__(
        self, agenda: Agenda, head: Head, plan: Iterable[PlannedRequest], pump: Callable[[], None]
    ) -> None:
        """``pump`` is called after each request that was submitted."""
        self._agenda = agenda
        self._head = head
        self._pump = pump
        self._plan = {str(request.index): request for request in plan}
        self._times: dict[str, list[float]] = {key: [] for key in self._plan}
        self._errors: dict[str, str] = {}
        self.left = len(self._plan)
        #: When something last came of a request, or the first one of several was sent.
        self.heard_at = 0.0
        self._live = 0
        self._live_since = 0.0
        #: Seconds in which any request was being served.
        self.live_s = 0.0

    def start(self) -> None:
        """Have every request sent when it is due."""
        for key, request in self._plan.items():
            self._agenda.at(request.at, self._submit, key, request)

    def _submit(self, key: str, planned: PlannedRequest) -> None:
        now = self._agenda.now
        count = planned.input_tokens
        request = HeadRequest(
            _OWNER, key, (0,) * count, count, planned.output_tokens, _SAMPLING, window=_WINDOW
        )
        if self._live == 0:
            self._live_since = self.heard_at = now
        self._live += 1
        try:
            emissions = self._head.submit(request, now)
        except MolinkError as error:
            self._over(key, now, str(error))
        else:
            self.deliver(emissions, now)
            self._pump()

    @property
    def waiting_s(self) -> float:
        """Seconds for which requests have been served without anything coming of it."""
        return self._agenda.now - self.heard_at if self._live else 0.0

    # --- the head's front desk -------------------------------------------------------------------

    def deliver(self, emissions: Iterable[Emission], now: float) -> None:
        """Take tokens and refusals."""
        self.heard_at = now
        for emission in emissions:
            message = emission.message
            if isinstance(message, Token):
                self._times[message.key].append(now)
                if message.finish is not None:
                    self._over(message.key, now)
            else:
                self._over(message.key, now, message.message)

    def close(self) -> None:
        """The ring has broken: nothing more comes."""

    def _over(self, key: str, now: float, error: str | None = None) -> None:
        self.left -= 1
        self._live -= 1
        if self._live == 0:
            self.live_s += now - self._live_since
        if error is not None:
            self._errors[key] = error
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
        if error is None and len(times) < request.output_tokens:
            error = f"{len(times)} of {request.output_tokens} tokens when the simulation ended"
        return Sample(
            request.at,
            times,
            times[-1] if times else request.at,
            request.input_tokens,
            len(times),
            error,
        )
