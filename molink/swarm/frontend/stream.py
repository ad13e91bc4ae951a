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
from molink.swarm.frontend.generation import GeneratedToken, GenerationRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.serving import Cancel, Credit, Rejected, Submit, Token

#: Of a deadline, in seconds: one that is over is the endpoint's to see.
_LEAST_S = 1e-3

StreamState = Literal["waiting", "running", "done"]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long and how often a stream tries, in seconds and counts."""

    #: How long to wait for a pipeline while none is being formed, or none that gets on. It counts
    #: on while a connection comes and goes.
    hold_s: float = 30.0
    #: How long to wait at most while one is; and for a token, after the first loss, where heads
    #: are lost again and again.
    max_wait_s: float = 600.0
    #: Tokens that a head may be ahead of the client.
    window: int = 256
    #: Epochs that may end with the request in them before it had a token there, and times that a
    #: head may say that it failed: a request that kills whoever serves it must end.
    max_fruitless: int = 4
    #: Pause before the same head is asked again.
    retry_s: float = 0.25
    #: A head that kept a request for longer than this was serving it: the next wait is a new one.
    served_s: float = 2.0


@dataclass(frozen=True, slots=True)
class HeadEpoch:
    """A pipeline that can take requests now, in its epoch."""

    pipeline: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SendSubmit:
    """Submit to the head of ``target``: the message with its ``grammar``, the ids in parts."""

    target: HeadEpoch
    submit: Submit
    ids: tuple[int, ...]
    grammar: bytes | None = None


@dataclass(frozen=True, slots=True)
class SendToHead:
    """Send a short message to the head of ``target``."""

    target: HeadEpoch
    message: Cancel | Credit


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand a token to the client."""

    token: GeneratedToken


@dataclass(frozen=True, slots=True)
class Fail:
    """End the client's stream with an error."""

    error: MolinkError


Act = SendSubmit | SendToHead | Emit | Fail


class Stream:
    """State machine of one request. Keys of its submissions are ``<key>.<attempt>``."""

    def __init__(
        self,
        key: str,
        request: GenerationRequest,
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
        self._prompt = tuple(request.prompt)
        #: Every token emitted so far, in order; never changed.
        self._emitted: list[int] = []
        self._taken = 0
        self._credited = 0
        #: Tokens that the present head may be ahead of the client.
        self._window = limits.window
        #: How many tokens heads may have sent by now.
        self._granted = 0
        self._attempt = 0
        #: Where the last submission went; ``None`` before the first.
        self._submitted: HeadEpoch | None = None
        #: A submission that its head may still be working on though we gave it up.
        self._abandoned: tuple[HeadEpoch, str] | None = None
        self._available: HeadEpoch | None = None
        #: When the present wait began; ``None`` once a token has come since.
        self._waiting_since: float | None = now if since is None else since
        #: When it came: until its first token it may wait for its turn from then on.
        self._began = now
        self._submitted_at = now
        self._retry_at = now
        #: The last sign that a pipeline is being formed, and when it came.
        self._sign = 0
        self._sign_at = now if since is None else since
        self._fruitless = 0
        #: Whether the last submission was the first one in its epoch.
        self._fresh = True
        #: Where it was lost before it had a token; ``None`` once it is known what became of that.
        self._lost_in: HeadEpoch | None = None
        #: When that happened for the first time since the last token.
        self._lost_at: float | None = None
        self._last_reason = "no pipeline serves this model"
        self._story: deque[str] = deque(maxlen=32)

    @property
    def attempt_key(self) -> str:
        """Key of the present submission."""
        return f"{self.key}.{self._attempt}"

    @property
    def waits(self) -> bool:
        """Whether it has had no token since it last began to wait for one."""
        return self.state != "done" and self._waiting_since is not None

    @property
    def next_wake(self) -> float | None:
        """When :meth:`wake` has to be called; ``None`` while there is nothing to wait for."""
        if self.state != "waiting":
            return None
        return self._deadline if self._available is None else min(self._deadline, self._retry_at)

    @property
    def _deadline(self) -> float:
        since, limits = self._waiting_since, self._limits
        assert since is not None
        hopeful = max(since, self._sign_at) + limits.hold_s
        first = since if self._lost_at is None else self._lost_at
        latest = min(hopeful, first + max(limits.hold_s, limits.max_wait_s))
        most = self._max_queue_s
        return min(latest, self._began + most) if most else latest

    @property
    def _max_queue_s(self) -> float:
        """Seconds that it may wait for its turn, if it says so; who has tokens has had it."""
        return 0.0 if self._emitted else self.request.max_queue_s

    @property
    def _untroubled(self) -> bool:
        """Whether nothing went wrong since the last token."""
        return self._fruitless == 0 and self._lost_at is None

    def forming(self, sign: int, now: float) -> None:
        """A pipeline is being formed: another ``sign`` than before says that it gets on.

        0 = none is.
        """
        if sign and sign != self._sign:
            self._sign_at = now
        self._sign = sign

    def unserved(self, reason: str) -> None:
        """Why there is no head, for the error that may follow."""
        if self.state == "waiting":
            self._last_reason = reason

    def head(self, target: HeadEpoch | None, now: float) -> list[Act]:
        """The head that can be asked now; ``None`` while there is none."""
        self._available = target
        if self.state == "running" and target != self._submitted:
            self._note(f"lost {self._submitted}")
            self._interrupted("the pipeline was interrupted", now)
        return self.wake(now)

    def token(self, message: Token, now: float) -> list[Act]:
        """A token arrives."""
        if not self._current(message.key) or self._submitted is None:
            return []
        if message.epoch != self._submitted.epoch:
            return []
        expected = len(self._prompt) + len(self._emitted)
        if message.position < expected:
            return []
        if message.position > expected:
            return self._retry(f"position {message.position} came, not {expected}", now)
        if len(self._emitted) >= self._granted + self._limits.window:
            return self._end(Unavailable("the pipeline sends more than it was asked for"))
        self._fruitless = 0
        self._waiting_since = self._lost_in = self._lost_at = None
        self._emitted.append(message.token)
        out_of_tokens = len(self._emitted) >= self.request.max_tokens
        finish = message.finish or ("length" if out_of_tokens else None)
        acts: list[Act] = [Emit(_generated(message, finish))]
        if finish is not None:
            if message.finish is None:
                acts += self._cancel()
            self.state = "done"
        return acts

    def rejected(self, message: Rejected, now: float) -> list[Act]:
        """The head does not take the request, or can't go on with it."""
        if not self._current(message.key):
            return []
        self._note(f"rejected: {message.reason}: {message.message}")
        text = message.message
        match message.reason:
            case "overloaded" if not self._emitted and self._untroubled:
                return self._end(Overloaded(text, message.retry_after or 1.0))
            case "too_long":
                return self._end(ContextTooLong(text, "max_tokens"))
            case "invalid":
                return self._end(RequestError(text))
            case "failed":
                return self._retry(text, now)
            case _:  # overloaded or of another epoch, in mid-stream: only a pause for the client
                if now - self._submitted_at > self._limits.served_s:
                    self._interrupted(text, now)
                else:
                    self._wait(text, now)
                self._retry_at = now + max(self._limits.retry_s, message.retry_after)
                return self.wake(now)

    def taken(self, count: int) -> list[Act]:
        """The client has taken ``count`` more tokens."""
        self._taken += count
        if self.state != "running" or self._submitted is None:
            return []
        if self._taken - self._credited < max(1, self._window // 4):
            return []
        self._credited = self._taken
        self._granted = max(self._granted, self._taken + self._window)
        position = len(self._prompt) + self._taken
        return [SendToHead(self._submitted, Credit(self.attempt_key, position))]

    def cancel(self) -> list[Act]:
        """The client has gone."""
        acts = self._cancel() if self.state == "running" else []
        self.state = "done"
        return acts

    def wake(self, now: float) -> list[Act]:
        """Submit if there is a head and the pause is over; give up when the wait is too long."""
        if self.state != "waiting":
            return []
        if self._lost_in is not None and self._available not in (None, self._lost_in):
            self._lost_in = None
            self._fruitless += 1  # that epoch has ended; a connection that broke costs only time
        if self._fruitless > self._limits.max_fruitless:
            return self._end(
                Unavailable(f"gave up after {self._fruitless} attempts: {self._last_reason}")
            )
        late = bool(self._max_queue_s) and now >= self._began + self._max_queue_s
        if self._available is not None and now >= self._retry_at and not late:
            return self._submit(self._available, now)
        if now >= self._deadline:
            assert self._waiting_since is not None
            return self._end(
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
        if self.state == "running" and self._submitted != self._available:
            raise InvariantError("running on a head that isn't there", self._story)
        if not self._taken <= len(self._emitted) <= self.request.max_tokens:
            raise InvariantError(f"{self._taken} taken, {len(self._emitted)} emitted", self._story)

    def _submit(self, target: HeadEpoch, now: float) -> list[Act]:
        acts: list[Act] = []
        if self._abandoned is not None and self._abandoned[0] == target:
            acts.append(SendToHead(target, Cancel(self._abandoned[1])))
        self._abandoned = None
        self._attempt += 1
        self._fresh = target != self._submitted
        self._submitted, self._submitted_at = target, now
        # What the client hasn't taken yet counts: a slow one doesn't get a whole window each time.
        unread = len(self._emitted) - self._taken
        self._window = max(1, self._limits.window // 8, self._limits.window - unread)
        self._credited, self._granted = self._taken, len(self._emitted) + self._window
        self.state = "running"
        self._note(f"submit {self.attempt_key} to {target}")
        ids, grammar = (*self._prompt, *self._emitted), self.request.grammar
        most, deadline_s = self._max_queue_s, self.request.deadline_s
        submit = Submit(
            pipeline=target.pipeline,
            epoch=target.epoch,
            key=self.attempt_key,
            tokens=len(ids),
            prompt_tokens=len(self._prompt),
            max_tokens=self.request.max_tokens - len(self._emitted),
            sampling=self.request.sampling,
            stop_ids=self.request.stop_ids,
            window=self._window,
            payload=Payload("u8", (len(grammar),)) if grammar else None,
            client=self.request.client,
            priority=self.request.priority,
            max_queue_s=most and most - (now - self._began),
            deadline_s=deadline_s and max(_LEAST_S, deadline_s - (now - self._began)),
        )
        return [*acts, SendSubmit(target, submit, ids, grammar or None)]

    def _retry(self, reason: str, now: float) -> list[Act]:
        """Submit again to the same head, a limited number of times."""
        acts = self._cancel()
        self._fruitless += 1
        self._wait(reason, now)
        self._retry_at = now + self._limits.retry_s
        return [*acts, *self.wake(now)]

    def _interrupted(self, reason: str, now: float) -> None:
        """The head is lost. If it was serving the request, the whole hold time begins again.

        It begins again in each new epoch, of which there may be only so many; not each time that a
        connection breaks.
        """
        assert self._submitted is not None
        self._abandoned = (self._submitted, self.attempt_key)
        if self._waiting_since is not None:  # no token came
            self._lost_in = self._submitted
            self._lost_at = now if self._lost_at is None else self._lost_at
        if self._fresh or now - self._submitted_at > self._limits.served_s:
            self._waiting_since = None
        self._wait(reason, now)

    def _wait(self, reason: str, now: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = now
        self._last_reason = reason
        self.state = "waiting"

    def _current(self, key: str) -> bool:
        return self.state == "running" and key == self.attempt_key

    def _cancel(self) -> list[Act]:
        assert self._submitted is not None
        return [SendToHead(self._submitted, Cancel(self.attempt_key))]

    def _end(self, error: MolinkError) -> list[Act]:
        acts = self._cancel() if self.state == "running" else []
        self.state = "done"
        return [*acts, Fail(error)]

    def _note(self, text: str) -> None:
        self._story.append(text)


def _generated(message: Token, finish: Literal["stop", "length"] | None) -> GeneratedToken:
    return GeneratedToken(
        position=message.position,
        token=message.token,
        logprob=message.logprob,
        top=message.top,
        finish=finish,
        cached=message.cached,
    )
