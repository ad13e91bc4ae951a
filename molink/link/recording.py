"""What a link's policy was told and what it decided, as JSON lines, and the same once more.

The first line names the policy. Each other line is an event, ``{"at", "event", "of"}``, or a
decision, ``{"at", "ready", "send": [volume, rows]}`` or ``{"at", "ready", "wait": until}`` (without
``wait`` if only an event ends it). Numbers are written so that they are read back exactly; times
are seconds of the recorder's clock.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec

from molink.errors import UsageError
from molink.link.policies.base import Decision, Event, LanePolicy, SendRows, Wait
from molink.link.policies.create import create_policy
from molink.wire.messages.data import Lane

VERSION = 1
#: Bytes of a recording; it ends there and can be replayed up to there.
MAX_BYTES = 256 << 20
#: Characters of one line; the longest that is written has about 200.
MAX_LINE = 4096

_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: Annotated[str, msgspec.Meta(max_length=64)]
    version: _Whole


class _Happened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: float
    event: str
    of: dict[str, Any]


class _Decided(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    at: float
    ready: Annotated[tuple[Lane, ...], msgspec.Meta(max_length=8)]
    send: tuple[_Whole, _Whole] | None = None
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise when line ``line`` was replayed."""

    line: int
    at: float
    recorded: Decision
    replayed: Decision


class RecordedPolicy:
    """A policy that notes everything it is told and decides, and else is the one it wraps."""

    def __init__(
        self, policy: LanePolicy, write: Callable[[bytes], object], maximum: int = MAX_BYTES
    ) -> None:
        """``write`` takes whole lines, ``maximum`` bytes of them at most."""
        self._policy = policy
        self._write = write
        self._left = maximum
        self._encoder = msgspec.json.Encoder()
        self._line(_Opened(policy.name, VERSION))

    @property
    def name(self) -> str:
        """That of the policy."""
        return self._policy.name

    @property
    def one_lane(self) -> bool:
        """As the policy."""
        return self._policy.one_lane

    @property
    def full(self) -> bool:
        """Whether the recording has ended because it is long enough."""
        return self._left <= 0

    def handle(self, event: Event, now: float) -> None:
        """Note it and pass it on."""
        if not self.full:
            fields = msgspec.to_builtins(event)
            self._line(_Happened(now, type(event).__name__, fields))
        self._policy.handle(event, now)

    def decide(self, now: float, ready: Collection[Lane]) -> Decision:
        """Ask the policy and note the answer."""
        lanes = tuple(ready)
        decision = self._policy.decide(now, ready)
        if isinstance(decision, SendRows):
            self._line(_Decided(at=now, ready=lanes, send=(decision.volume, decision.rows)))
        else:
            self._line(_Decided(at=now, ready=lanes, wait=decision.until))
        return decision

    def _line(self, record: _Opened | _Happened | _Decided) -> None:
        if self.full:
            return
        line = self._encoder.encode(record) + b"\n"
        if len(line) > self._left:
            self._left = 0
            return
        self._left -= len(line)
        self._write(line)


def replay(
    lines: Iterable[bytes | str], create: Callable[[str], LanePolicy] = create_policy
) -> list[Difference]:
    """Tell a fresh policy of the same name the same, and compare what it decides.

    Raises:
        UsageError: a line is no line of a recording; says which.
    """
    differences: list[Difference] = []
    policy: LanePolicy | None = None
    number = 0
    for number, line in enumerate(lines, start=1):
        try:
            record = _read(line, first=policy is None)
            if isinstance(record, _Opened):
                policy = create(record.policy)
                continue
            assert policy is not None
            if isinstance(record, _Happened):
                policy.handle(_event(record), record.at)
                continue
        except (msgspec.MsgspecError, UsageError, ValueError) as error:
            raise UsageError(f"line {number} of the recording: {error}") from None
        recorded = Wait(record.wait) if record.send is None else SendRows(*record.send)
        replayed = policy.decide(record.at, list(record.ready))
        if replayed != recorded:
            differences.append(Difference(number, record.at, recorded, replayed))
    if policy is None:
        raise UsageError("the recording is empty")
    return differences


def _read(line: bytes | str, first: bool) -> _Opened | _Happened | _Decided:
    if len(line) > MAX_LINE:
        raise UsageError(f"{len(line)} characters are more than {MAX_LINE}")
    if first:
        opened = msgspec.json.decode(line, type=_Opened)
        if opened.version != VERSION:
            raise UsageError(f"version {opened.version}, where this molink reads {VERSION}")
        return opened
    raw = msgspec.json.decode(line, type=dict[str, Any])
    if "event" in raw:
        return msgspec.convert(raw, _Happened)
    return msgspec.convert(raw, _Decided)


def _event(record: _Happened) -> Event:
    kind = _EVENTS.get(record.event)
    if kind is None:
        raise UsageError(f"there is no event {record.event!r}")
    event = msgspec.convert(record.of, kind)
    for name in ("rows", "row_bytes"):
        if getattr(event, name, 1) < 1:
            raise UsageError(f"{name} of {record.event} is {record.of[name]}")
    for name, value in record.of.items():
        if isinstance(value, int) and value < 0:
            raise UsageError(f"{name} of {record.event} is {value}")
    return event
