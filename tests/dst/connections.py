"""A daemon's connections: to the coordinator, and to the heads of pipelines."""

from typing import TYPE_CHECKING, Any

from molink.errors import MolinkError
from molink.link.ends import ChannelEvents
from molink.swarm.frontend.stream import HeadEpoch
from molink.wire.messages.instructions import Route, StillThere, Welcome
from molink.wire.messages.leading import Noted
from tests.dst.coordinator import PORT
from tests.dst.network import Dial, nothing

if TYPE_CHECKING:
    from tests.dst.daemon import Daemon

REPORT_INTERVAL = 0.5


class Session:
    """The connection to the coordinator, as :mod:`molinkd.peer.membership.session` has it."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self.welcome = False
        self._obeys = self._unheeded = False
        self.dial = self._connection()

    def _connection(self) -> Dial:
        daemon, target = self._daemon, self._daemon.peer.membership
        events = ChannelEvents(self._take, self._connected, self._lost, nothing, nothing)
        where = target.address, PORT
        self._target = target.key, where
        network = daemon.world.network
        return Dial(network, daemon, daemon.peer.id, lambda: where, target.key, events)

    def follow(self) -> None:
        """Connect to where the coordinator is now."""
        target = self._daemon.peer.membership
        if (target.key, (target.address, PORT)) != self._target:
            self.dial.close()
            self.welcome = self._obeys = False
            self.dial = self._connection()
            self.dial.start()

    def _connected(self) -> None:
        self._obeys = self._unheeded = False
        self.report()

    def start(self) -> None:
        self.dial.start()
        self._beat()

    def tell(self, message: Any, payload: Any = None) -> None:
        if self.welcome and self.dial.connected:
            self.dial.send(message, payload)

    def report(self) -> None:
        if self.dial.connected:
            self._send(self._daemon.report())

    def _send(self, message: Any) -> None:
        if self.dial.connected:
            self.dial.send(message)

    def _lost(self) -> None:
        self.welcome = False
        self._daemon.leadership.cut()

    def _beat(self) -> None:
        self.report()
        self._daemon.later(REPORT_INTERVAL, self._beat)

    def _take(self, message: Any, payload: Any) -> None:
        match message:
            case Noted(term=term, leader=leader):
                self._obeys = self._daemon.leadership.noted(term, leader)
                if self._obeys:
                    self._daemon.world.monitor.obeys(self._daemon, term)
                    if self._unheeded:
                        self._unheeded = False
                        self.dial.redial()
            case StillThere():
                pass
            case Welcome() if self._obeys:
                self.welcome = True
                self._daemon.welcomed()
            case Welcome():
                self._unheeded = True
            case _ if self.welcome:
                self._daemon.told(message, payload)


class Heads:
    """Connections to the heads of all pipelines, as :mod:`molinkd.peer.frontend.heads` has it."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._routes: dict[str, Route] = {}
        self._dials: dict[str, Dial] = {}
        self._unconfirmed: set[str] = set()

    def welcomed(self) -> None:
        self._unconfirmed = set(self._routes)

    def update(self, route: Route) -> None:
        old = self._routes.get(route.pipeline)
        known = route.pipeline not in self._unconfirmed
        if old is not None and known and route.epoch < old.epoch:
            return
        self._unconfirmed.discard(route.pipeline)
        if route.ready:
            for pipeline in sorted(self._unconfirmed):
                same = self._routes[pipeline].model == route.model
                if same and pipeline not in route.beside:
                    self.remove(pipeline)
        if old is not None and (old.head != route.head or route.head is None):
            self._disconnect(route.pipeline)
        self._routes[route.pipeline] = route
        if route.pipeline not in self._dials and route.head is not None:
            self._connect(route)
        self._daemon.heads_changed()

    def remove(self, pipeline: str) -> None:
        self._unconfirmed.discard(pipeline)
        if self._routes.pop(pipeline, None) is not None:
            self._disconnect(pipeline)
            self._daemon.heads_changed()

    def targets(self, model: str) -> list[HeadEpoch]:
        return [
            HeadEpoch(route.pipeline, route.epoch)
            for route in self._routes.values()
            if route.ready
            and route.model == model
            and (dial := self._dials.get(route.pipeline)) is not None
            and dial.connected
        ]

    def send(self, target: HeadEpoch, message: Any, payload: Any = None) -> None:
        route, dial = self._routes.get(target.pipeline), self._dials.get(target.pipeline)
        if route is None or dial is None or route.epoch != target.epoch:
            raise MolinkError("the head is gone")
        dial.send(message, payload)

    @property
    def known(self) -> tuple[tuple[str, int, bool], ...]:
        return tuple((one.pipeline, one.epoch, one.ready) for one in self._routes.values())

    def forming(self, model: str) -> int:
        return sum(route.forming for route in self._routes.values() if route.model == model)

    def _connect(self, route: Route) -> None:
        assert route.head is not None
        if not route.head.addresses:
            return
        pipeline, world = route.pipeline, self._daemon.world
        where = world.where(route.head)
        changed = self._daemon.heads_changed
        events = ChannelEvents(
            lambda message, _: self._daemon.head_said(pipeline, message),
            changed,
            changed,
            nothing,
            nothing,
        )
        peer, key = self._daemon.peer.id, route.head.peer
        dial = Dial(world.network, self._daemon, peer, lambda: where, key, events, echoes="down")
        self._dials[pipeline] = dial
        dial.start()

    def _disconnect(self, pipeline: str) -> None:
        dial = self._dials.pop(pipeline, None)
        if dial is not None:
            dial.close()
