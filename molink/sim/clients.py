"""Clients: they send requests when these are due, and note when each token comes."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from molink.bench.planned_requests import PlannedRequest
from molink.bench.sample import Sample
from molink.errors import InvariantError, MolinkError
from molink.scheduler.request_state import Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.sim.event_queue import EventQueue
from molink.sim.known_text import END_TOKEN, KnownText, tokens_of
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken, Request

#: Uncredited tokens: clients that take everything at once never make a stream wait.
_CREDIT_WINDOW = 1 << 24
_PEER = "clients"


class ServingRing(Protocol):
    """What takes requests: a ring."""

    @property
    def scheduler(self) -> Scheduler:
        """Where they are submitted."""

    def issue_batches(self) -> None:
        """The head has a new one."""


#: Who is to serve a request now; ``None``: nobody is there, somebody will ask again.
ChooseRing = Callable[[PlannedRequest], ServingRing | None]


class Clients:
    """Sends ``plan`` to the heads that ``choose`` names, and keeps the time of every token.

    ``agenda`` is stopped after the last one. It is the heads' front desk, too. Prompts have no
    content that could be shared, unless there are ``texts`` or a trace says what they share.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        plan: Iterable[PlannedRequest],
        choose: ChooseRing,
        texts: Sequence[KnownText] = (),
    ) -> None:
        self._event_queue = event_queue
        self._choose_ring = choose
        self._texts = texts
        self._plan = {str(request.index): request for request in plan}
        self._times: dict[str, array[float]] = {key: array("d") for key in self._plan}
        self._errors: dict[str, str] = {}
        #: Who serves those that live; nobody those that wait.
        self._serving: dict[str, ServingRing | None] = {}
        self.num_unfinished = len(self._plan)
        #: When something last came of a request, or the first one of several was sent.
        self.last_event_at = 0.0
        self._live_since = 0.0
        #: Seconds in which any request was being served.
        self.live_s = 0.0
        #: Told of each request that is over: who served it, its key, tokens of the answer, when.
        self.on_finished: Callable[[ServingRing | None, str, int, float], None] | None = None
        #: Told of a request's first token, of how many prompt tokens were cached, and when.
        self.on_first_token: Callable[[str, int, float], None] | None = None

    def start(self) -> None:
        """Have every request sent when it is due."""
        for key, request in self._plan.items():
            self._event_queue.schedule_at(request.arrival_s, self._send_request, key)

    def _send_request(self, key: str) -> None:
        now = self._event_queue.now
        if not self._serving:
            self._live_since = self.last_event_at = now
        self._serving[key] = None
        self._submit_request(key)

    def _submit_request(self, key: str) -> None:
        """Send the prompt, and what there is of the answer; the rest is to come."""
        planned, now = self._plan[key], self._event_queue.now
        serving = self._serving[key] = self._choose_ring(planned)
        if serving is None:
            return
        there = len(self._times[key])
        count = planned.input_tokens
        ids = self._token_ids(planned, count + there)
        request = Request(
            model="",
            prompt_token_ids=ids[:count],
            max_tokens=planned.max_tokens or planned.output_tokens,
            # Simulated stages derive tokens from the seed.
            sampling_params=SamplingParams(
                temperature=0.0, seed=planned.index if self._texts else planned.last_position
            ),
            stop_token_ids=() if self._texts else (END_TOKEN,),
        )
        state = RequestState.from_request(
            request, _PEER, key, ids[count:], credit_window=_CREDIT_WINDOW
        )
        try:
            emissions = serving.scheduler.submit_request(state, now)
        except MolinkError as error:
            self._finish_request(key, now, str(error))
        else:
            self.deliver_emissions(emissions, now)
            serving.issue_batches()

    def _token_ids(self, planned: PlannedRequest, count: int) -> tuple[int, ...]:
        """The first ``count`` tokens of prompt and answer."""
        if not self._texts:
            return tokens_of(planned, count)
        text = self._texts[planned.index % len(self._texts)]
        return (*text.prompt, *text.answer)[:count]

    def prompt_tokens(self, planned: PlannedRequest) -> tuple[int, ...]:
        """The tokens of a prompt."""
        return self._token_ids(planned, planned.input_tokens)

    def detach_ring(self, serving: ServingRing) -> list[str]:
        """It is gone: those that it served wait, and can be sent again; returns their keys."""
        lost = [key for key, other in self._serving.items() if other is serving]
        for key in lost:
            self._serving[key] = None
        return lost

    def resend_requests(self, keys: Iterable[str]) -> None:
        """Send those again that wait."""
        for key in keys:
            if key in self._serving and self._serving[key] is None:
                self._submit_request(key)

    @property
    def waiting_keys(self) -> list[str]:
        """Keys of those that nobody serves."""
        return [key for key, serving in self._serving.items() if serving is None]

    @property
    def silence_s(self) -> float:
        """Seconds for which requests have been served without anything coming of it."""
        return self._event_queue.now - self.last_event_at if self._serving else 0.0

    # --- the heads' front desk -------------------------------------------------------------------

    def deliver_emissions(self, emissions: Iterable[Emission], now: float) -> None:
        """Take tokens and refusals.

        Raises:
            InvariantError: a token came twice, another one came, or one is missing before it.
        """
        self.last_event_at = now
        for emission in emissions:
            message = emission.message
            if isinstance(message, OutputToken):
                times = self._times[message.key]
                if message.position != self._plan[message.key].input_tokens + len(times):
                    raise InvariantError(f"request {message.key}: position {message.position}")
                if self._texts and message.token != self._expected_token(message):
                    raise InvariantError(f"request {message.key}: another token came")
                times.append(now)
                if self.on_first_token is not None and len(times) == 1:
                    self.on_first_token(message.key, message.cached_tokens, now)
                if message.finish_reason is not None:
                    self._finish_request(message.key, now)
            else:
                self._finish_request(message.key, now, message.message)

    def _expected_token(self, message: OutputToken) -> int:
        text = self._texts[self._plan[message.key].index % len(self._texts)]
        return text.token_at(message.position)

    def close(self) -> None:
        """A ring has ended: nothing more comes of it."""

    def _finish_request(self, key: str, now: float, error: str | None = None) -> None:
        self.num_unfinished -= 1
        serving = self._serving.pop(key)
        if not self._serving:
            self.live_s += now - self._live_since
        if error is not None:
            self._errors[key] = error
        if self.on_finished is not None:
            self.on_finished(serving, key, len(self._times[key]), now)
        if self.num_unfinished == 0:
            self._event_queue.stop()

    # --- what was measured -----------------------------------------------------------------------

    def collect_samples(self, since: float) -> list[Sample]:
        """What the requests that were due at ``since`` or later measured."""
        return [
            self._make_sample(key, request)
            for key, request in self._plan.items()
            if request.arrival_s >= since
        ]

    def _make_sample(self, key: str, request: PlannedRequest) -> Sample:
        times = tuple(self._times[key])
        error = self._errors.get(key)
        if error is None and len(times) != request.output_tokens:
            error = f"{len(times)} of {request.output_tokens} tokens when the simulation ended"
        return Sample(
            request.arrival_s,
            times,
            times[-1] if times else request.arrival_s,
            request.input_tokens,
            len(times),
            error,
        )
