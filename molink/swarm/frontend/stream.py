"""One request as its daemon owns it: submitted, resubmitted after every loss, emitted once.

The daemon holds the prompt, the parameters and all tokens emitted so far. Whatever happens to the
pipeline, recovery is the same act: submit prompt + emitted tokens to the head of the new epoch. A
position is emitted once and never changes. A plain object: events and ``now`` in, acts out.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from molink.errors import (
    ContextTooLong,
    InvariantError,
    MolinkError,
    Overloaded,
    RequestError,
    Unavailable,
)
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.wire.messages.base import Payload
from molink.wire.messages.serving import Cancel, Credit, OutputToken, Rejected, Request, Submit

StreamState = Literal["waiting", "running", "done"]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long and how often a stream tries, in seconds and counts."""

    #: How long to wait for a pipeline while none is being formed, or none that gets on. It counts
    #: on while a connection comes and goes.
    pipeline_wait_timeout: float = 30.0
    #: How long to wait at most while one is; and for a token, after the first loss, where heads
    #: are lost again and again.
    max_wait_s: float = 600.0
    #: Tokens that a head may be ahead of the client.
    credit_window: int = 256
    #: Epochs that may end with the request in them before it had a token there, and times that a
    #: head may say that it failed: a request that kills whoever serves it must end.
    max_failed_attempts: int = 4
    #: Pause before the same head is asked again.
    retry_delay_s: float = 0.25
    #: A head that kept a request for longer than this was serving it: the next wait is a new one.
    min_service_s: float = 2.0


@dataclass(frozen=True, slots=True)
class PipelineEpoch:
    """A pipeline that can take requests now, in its epoch."""

    pipeline: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SubmitAction:
    """Submit to the head of ``target``: the message with its ``grammar``, the ids in parts."""

    target: PipelineEpoch
    submit: Submit
    token_ids: tuple[int, ...]
    grammar: bytes | None = None


@dataclass(frozen=True, slots=True)
class SendToSchedulerAction:
    """Send a short message to the head of ``target``."""

    target: PipelineEpoch
    message: Cancel | Credit


@dataclass(frozen=True, slots=True)
class EmitTokenAction:
    """Hand a token to the client."""

    token: GeneratedToken


@dataclass(frozen=True, slots=True)
class FailStreamAction:
    """End the client's stream with an error."""

    error: MolinkError


StreamAction = SubmitAction | SendToSchedulerAction | EmitTokenAction | FailStreamAction


class RequestStream:
    """State machine of one request. Keys of its submissions are ``<key>.<attempt>``."""

    def __init__(
        self,
        key: str,
        request: Request,
        limits: StreamLimits,
        now: float,
        since: float | None = None,
    ) -> None:
        """``since`` when nothing has been there that could serve it; ``None``: there is, or may be.

        What others have waited for in vain, it doesn't wait for anew.
        """
        self.key = key
        self.request = request
        self.state: StreamState = "waiting"
        self._limits = limits
        self._prompt = request.prompt_token_ids
        #: Every token emitted so far, in order; never changed.
        self._emitted: list[int] = []
        self._num_consumed = 0
        self._num_credited = 0
        #: Tokens that the present head may be ahead of the client.
        self._window = limits.credit_window
        #: How many tokens heads may have sent by now.
        self._num_granted = 0
        self._attempt = 0
        #: Where the last submission went; ``None`` before the first.
        self._submitted: PipelineEpoch | None = None
        #: A submission that its head may still be working on though we gave it up.
        self._abandoned: tuple[PipelineEpoch, str] | None = None
        self._target: PipelineEpoch | None = None
        #: When the present wait began; ``None`` once a token has come since.
        self._waiting_since: float | None = now if since is None else since
        #: When it came: until its first token it may wait for its turn from then on.
        self._started_at = now
        self._submitted_at = now
        self._retry_at = now
        #: The last sign that a pipeline is being formed, and when it came.
        self._formation_progress = 0
        self._progress_at = now if since is None else since
        self._failed_attempts = 0
        #: Whether the last submission was the first one in its epoch.
        self._is_first_in_epoch = True
        #: Where it was lost before it had a token; ``None`` once it is known what became of that.
        self._lost_target: PipelineEpoch | None = None
        #: When that happened for the first time since the last token.
        self._lost_at: float | None = None
        self._last_reason = "no pipeline serves this model"
        self._story: deque[str] = deque(maxlen=32)

    @property
    def attempt_key(self) -> str:
        """Key of the present submission."""
        return f"{self.key}.{self._attempt}"

    @property
    def is_waiting(self) -> bool:
        """Whether it has had no token since it last began to wait for one."""
        return self.state != "done" and self._waiting_since is not None

    @property
    def next_wake_at(self) -> float | None:
        """When :meth:`wake` has to be called; ``None`` while there is nothing to wait for."""
        if self.state != "waiting":
            return None
        return self._deadline if self._target is None else min(self._deadline, self._retry_at)

    @property
    def _deadline(self) -> float:
        since, limits = self._waiting_since, self._limits
        assert since is not None
        hopeful = max(since, self._progress_at) + limits.pipeline_wait_timeout
        first = since if self._lost_at is None else self._lost_at
        latest = min(hopeful, first + max(limits.pipeline_wait_timeout, limits.max_wait_s))
        most = self._max_queue_s
        return min(latest, self._started_at + most) if most else latest

    @property
    def _max_queue_s(self) -> float:
        """Seconds that it may wait for its turn, if it says so; who has tokens has had it."""
        return 0.0 if self._emitted else self.request.max_queue_s

    @property
    def _has_no_failures(self) -> bool:
        """Whether nothing went wrong since the last token."""
        return self._failed_attempts == 0 and self._lost_at is None

    def on_formation_progress(self, progress: int, now: float) -> None:
        """A pipeline is being formed: another ``sign`` than before says that it gets on.

        0 = none is.
        """
        if progress and progress != self._formation_progress:
            self._progress_at = now
        self._formation_progress = progress

    def set_unserved_reason(self, reason: str) -> None:
        """Why there is no head, for the error that may follow."""
        if self.state == "waiting":
            self._last_reason = reason

    def set_target(self, target: PipelineEpoch | None, now: float) -> list[StreamAction]:
        """The head that can be asked now; ``None`` while there is none."""
        self._target = target
        if self.state == "running" and target != self._submitted:
            self._log_transition(f"lost {self._submitted}")
            self._on_pipeline_lost("the pipeline was interrupted", now)
        return self.wake(now)

    def on_token(self, message: OutputToken, now: float) -> list[StreamAction]:
        """A token arrives."""
        if not self._is_current(message.key) or self._submitted is None:
            return []
        if message.epoch != self._submitted.epoch:
            return []
        expected = len(self._prompt) + len(self._emitted)
        if message.position < expected:
            return []
        if message.position > expected:
            return self._retry(f"position {message.position} came, not {expected}", now)
        if len(self._emitted) >= self._num_granted + self._limits.credit_window:
            return self._fail_stream(Unavailable("the pipeline sends more than it was asked for"))
        self._failed_attempts = 0
        self._waiting_since = self._lost_target = self._lost_at = None
        self._emitted.append(message.token)
        out_of_tokens = len(self._emitted) >= self.request.max_tokens
        finish = message.finish_reason or ("length" if out_of_tokens else None)
        actions: list[StreamAction] = [EmitTokenAction(_to_generated_token(message, finish))]
        if finish is not None:
            if message.finish_reason is None:
                actions += self._cancel_attempt()
            self.state = "done"
        return actions

    def on_rejected(self, message: Rejected, now: float) -> list[StreamAction]:
        """The head does not take the request, or can't go on with it."""
        if not self._is_current(message.key):
            return []
        self._log_transition(f"rejected: {message.reason}: {message.message}")
        text = message.message
        match message.reason:
            case "overloaded" if not self._emitted and self._has_no_failures:
                return self._fail_stream(Overloaded(text, message.retry_after or 1.0))
            case "too_long":
                return self._fail_stream(ContextTooLong(text, "max_tokens"))
            case "invalid":
                return self._fail_stream(RequestError(text))
            case "failed":
                return self._retry(text, now)
            case _:  # overloaded or of another epoch, in mid-stream: only a pause for the client
                if now - self._submitted_at > self._limits.min_service_s:
                    self._on_pipeline_lost(text, now)
                else:
                    self._enter_waiting(text, now)
                self._retry_at = now + max(self._limits.retry_delay_s, message.retry_after)
                return self.wake(now)

    def on_tokens_consumed(self, count: int) -> list[StreamAction]:
        """The client has taken ``count`` more tokens."""
        self._num_consumed += count
        if self.state != "running" or self._submitted is None:
            return []
        if self._num_consumed - self._num_credited < max(1, self._window // 4):
            return []
        self._num_credited = self._num_consumed
        self._num_granted = max(self._num_granted, self._num_consumed + self._window)
        position = len(self._prompt) + self._num_consumed
        return [SendToSchedulerAction(self._submitted, Credit(self.attempt_key, position))]

    def cancel(self) -> list[StreamAction]:
        """The client has gone."""
        actions = self._cancel_attempt() if self.state == "running" else []
        self.state = "done"
        return actions

    def wake(self, now: float) -> list[StreamAction]:
        """Submit if there is a head and the pause is over; give up when the wait is too long."""
        if self.state != "waiting":
            return []
        if self._lost_target is not None and self._target not in (None, self._lost_target):
            self._lost_target = None
            self._failed_attempts += (
                1  # that epoch has ended; a connection that broke costs only time
            )
        if self._failed_attempts > self._limits.max_failed_attempts:
            return self._fail_stream(
                Unavailable(f"gave up after {self._failed_attempts} attempts: {self._last_reason}")
            )
        late = bool(self._max_queue_s) and now >= self._started_at + self._max_queue_s
        if self._target is not None and now >= self._retry_at and not late:
            return self._submit(self._target, now)
        if now >= self._deadline:
            assert self._waiting_since is not None
            return self._fail_stream(
                Unavailable(
                    f"no pipeline could serve the request for {now - self._waiting_since:.0f} s: "
                    f"{self._last_reason}. See `molink status`."
                )
            )
        return []

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        if self.state == "running" and self._submitted != self._target:
            raise InvariantError("running on a head that isn't there", self._story)
        if not self._num_consumed <= len(self._emitted) <= self.request.max_tokens:
            raise InvariantError(
                f"{self._num_consumed} taken, {len(self._emitted)} emitted", self._story
            )

    def _submit(self, target: PipelineEpoch, now: float) -> list[StreamAction]:
        actions: list[StreamAction] = []
        if self._abandoned is not None and self._abandoned[0] == target:
            actions.append(SendToSchedulerAction(target, Cancel(self._abandoned[1])))
        self._abandoned = None
        self._attempt += 1
        self._is_first_in_epoch = target != self._submitted
        self._submitted, self._submitted_at = target, now
        # What the client hasn't taken yet counts: a slow one doesn't get a whole window each time.
        unread = len(self._emitted) - self._num_consumed
        self._window = max(1, self._limits.credit_window // 8, self._limits.credit_window - unread)
        self._num_credited, self._num_granted = (
            self._num_consumed,
            len(self._emitted) + self._window,
        )
        self.state = "running"
        self._log_transition(f"submit {self.attempt_key} to {target}")
        ids, grammar = (*self._prompt, *self._emitted), self.request.grammar
        submit = Submit(
            pipeline=target.pipeline,
            epoch=target.epoch,
            key=self.attempt_key,
            request=self.request.without_payloads(),
            num_tokens=len(ids),
            num_prompt_tokens=len(self._prompt),
            elapsed_s=now - self._started_at,
            credit_window=self._window,
            payload=Payload("u8", (len(grammar),)) if grammar else None,
        )
        return [*actions, SubmitAction(target, submit, ids, grammar or None)]

    def _retry(self, reason: str, now: float) -> list[StreamAction]:
        """Submit again to the same head, a limited number of times."""
        actions = self._cancel_attempt()
        self._failed_attempts += 1
        self._enter_waiting(reason, now)
        self._retry_at = now + self._limits.retry_delay_s
        return [*actions, *self.wake(now)]

    def _on_pipeline_lost(self, reason: str, now: float) -> None:
        """The head is lost. If it was serving the request, the whole hold time begins again.

        It begins again in each new epoch, of which there may be only so many; not each time that a
        connection breaks.
        """
        assert self._submitted is not None
        self._abandoned = (self._submitted, self.attempt_key)
        if self._waiting_since is not None:  # no token came
            self._lost_target = self._submitted
            self._lost_at = now if self._lost_at is None else self._lost_at
        if self._is_first_in_epoch or now - self._submitted_at > self._limits.min_service_s:
            self._waiting_since = None
        self._enter_waiting(reason, now)

    def _enter_waiting(self, reason: str, now: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = now
        self._last_reason = reason
        self.state = "waiting"

    def _is_current(self, key: str) -> bool:
        return self.state == "running" and key == self.attempt_key

    def _cancel_attempt(self) -> list[StreamAction]:
        assert self._submitted is not None
        return [SendToSchedulerAction(self._submitted, Cancel(self.attempt_key))]

    def _fail_stream(self, error: MolinkError) -> list[StreamAction]:
        actions = self._cancel_attempt() if self.state == "running" else []
        self.state = "done"
        return [*actions, FailStreamAction(error)]

    def _log_transition(self, text: str) -> None:
        self._story.append(text)


def _to_generated_token(
    message: OutputToken, finish: Literal["stop", "length"] | None
) -> GeneratedToken:
    return GeneratedToken(
        position=message.position,
        token=message.token,
        logprob=message.logprob,
        top=message.top,
        finish_reason=finish,
        cached_tokens=message.cached_tokens,
    )
