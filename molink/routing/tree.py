"""Which beginnings of prompts are cached where: a radix tree over spans, for all pipelines."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from molink.errors import InvariantError
from molink.routing.base import Name
from molink.routing.spans import SPAN

#: Spans of a pipeline whose room is unknown, and of all together: 8 M tokens.
DEFAULT_SPANS = 8192
MAX_SPANS = 131_072


class SpanUse:
    """A node at one pipeline: when it was last used there, and how often in a window.

    Requests are counted in the present half of a window and in the one before.
    """

    __slots__ = ("_before", "_count", "_half", "at")

    def __init__(self) -> None:
        self.at = float("-inf")
        self._half = self._count = self._before = 0

    def add(self, now: float, half_s: float) -> None:
        """One more request."""
        self._turn(int(now / half_s))
        self._count += 1
        self.at = now

    def requests(self, now: float, half_s: float) -> int:
        """In the last one to two halves of ``half_s`` seconds."""
        self._turn(int(now / half_s))
        return self._count + self._before

    def _turn(self, half: int) -> None:
        if half != self._half:
            self._before = self._count if half == self._half + 1 else 0
            self._half, self._count = half, 0


class SpanTree:
    """The nodes are spans. A span's digest is of all that leads to it, so it names the path.

    Each pipeline has its nodes in the order of their last use. A path is used as a whole, and its
    beginning counts as used last: what is forgotten first is never before what follows it. So a
    pipeline has at most as many nodes as its cache has room for, and all have ``maximum``.

    Presence is what was sent there, and what reports say: a guess in both directions.
    """

    def __init__(self, half_s: float, maximum: int = MAX_SPANS) -> None:
        self._half_s = half_s
        self._maximum = maximum
        self._nodes: dict[Name, OrderedDict[int, SpanUse]] = {}
        self._rooms: dict[Name, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def count(self, name: Name) -> int:
        """Nodes of a pipeline."""
        return len(self._nodes.get(name, ()))

    def match(self, name: Name, spans: Sequence[int]) -> int:
        """How many of the first spans a pipeline has."""
        nodes = self._nodes.get(name)
        if nodes is None:
            return 0
        for index, digest in enumerate(spans):
            if digest not in nodes:
                return index
        return len(spans)

    def use(self, name: Name, spans: Sequence[int], now: float) -> None:
        """A request with these was sent there: soon they will be cached."""
        nodes, half_s = self._nodes.setdefault(name, OrderedDict()), self._half_s
        for digest in reversed(spans[: self._room(name)]):
            use = nodes.get(digest)
            if use is None:
                use = nodes[digest] = SpanUse()
            else:
                nodes.move_to_end(digest)
            use.add(now, half_s)
        self._shrink(name)

    def add(self, name: Name, spans: Iterable[int]) -> None:
        """They are cached there; where they are new, they are the first to be forgotten."""
        nodes = self._nodes.setdefault(name, OrderedDict())
        room = min(self._room(name), len(nodes) + self._maximum - len(self))
        for digest in spans:
            if len(nodes) >= room:
                return
            if digest not in nodes:
                nodes[digest] = SpanUse()
                nodes.move_to_end(digest, last=False)

    def remove(self, name: Name, spans: Iterable[int]) -> None:
        """They are not cached there."""
        nodes = self._of(name)
        for digest in spans:
            nodes.pop(digest, None)

    def keep(self, name: Name, spans: frozenset[int], since: float) -> None:
        """Nothing else is cached there but what was used ``since`` then."""
        nodes = self._of(name)
        for digest in [d for d, use in nodes.items() if d not in spans and use.at < since]:
            del nodes[digest]

    def forget(self, name: Name) -> None:
        """The pipeline is gone."""
        self._nodes.pop(name, None)
        self._rooms.pop(name, None)

    def set_room(self, name: Name, tokens: int) -> None:
        """A pipeline's cache has room for so many tokens."""
        self._rooms[name] = max(1, tokens // SPAN)
        self._shrink(name)

    def requests(self, name: Name, digest: int, now: float) -> int:
        """How many requests used a node there in the window."""
        use = self._of(name).get(digest)
        return 0 if use is None else use.requests(now, self._half_s)

    def evicted_by(self, name: Name, spans: int, now: float, most: int = 64) -> float:
        """Spans that would be forgotten there for so many new ones, and that are used in common.

        Those count that several requests used in the window. It looks at the first ``most``.
        """
        nodes = self._of(name)
        lacking = len(nodes) + spans - self._room(name)
        if lacking <= 0:
            return 0.0
        seen = common = 0
        for use in nodes.values():
            if seen == min(most, lacking):
                break
            seen += 1
            common += use.requests(now, self._half_s) > 1
        return common * lacking / seen if seen else 0.0

    def validate(self) -> None:
        """Check the bounds.

        Raises:
            InvariantError: there are more nodes than there may be.
        """
        for name, nodes in self._nodes.items():
            if len(nodes) > self._room(name):
                raise InvariantError(f"{len(nodes)} spans of {name}, more than it has room for")
        if len(self) > self._maximum:
            raise InvariantError(f"{len(self)} spans, more than {self._maximum}")

    def _of(self, name: Name) -> OrderedDict[int, SpanUse]:
        """The nodes of a pipeline; to be added to only if it is known."""
        return self._nodes.get(name, OrderedDict())

    def _room(self, name: Name) -> int:
        return min(self._rooms.get(name, DEFAULT_SPANS), self._maximum)

    def _shrink(self, name: Name) -> None:
        """Forget what was unused longest: there, then wherever there is most."""
        nodes, room = self._of(name), self._room(name)
        while len(nodes) > room:
            nodes.popitem(last=False)
        while len(self) > self._maximum:
            max(self._nodes.values(), key=len).popitem(last=False)
