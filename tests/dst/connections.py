"""A daemon's connections to the coordinator and to pipelines' schedulers."""

from typing import TYPE_CHECKING, Any

from molink.errors import MolinkError
from molink.link.base import OutConnectionEvents
from molink.swarm.frontend.stream import PipelineEpoch
from molink.wire.messages.election import LeaderHeartbeat
from molink.wire.messages.instructions import KeepAlive, Route, Welcome
from tests.dst.coordinator import PORT
from tests.dst.network import Dial, nothing

if TYPE_CHECKING:
    from tests.dst.daemon import Daemon

REPORT_INTERVAL = 0.5


class Session:
    """Connection to the coordinator, like :mod:`molinkd.peer.membership.session`."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self.welcome = False
        self._obeys = self._unheeded = False
        self.dial = self._connection()

    def _connection(self) -> Dial:
        daemon, target = self._daemon, self._daemon.peer.membership
        events = OutConnectionEvents(
            self._on_message, self._on_connected, self._on_lost, nothing, nothing
        )
        where = target.address, PORT
        self._target = target.key, where
        network = daemon.world.network
        return Dial(network, daemon, daemon.peer.id, lambda: where, target.key, events)

    def follow_coordinator(self) -> None:
        """Connect to the coordinator's current address."""
        target = self._daemon.peer.membership
        if (target.key, (target.address, PORT)) != self._target:
            self.dial.close()
            self.welcome = self._obeys = False
            self.dial = self._connection()
            self.dial.start()

    def _on_connected(self) -> None:
        self._obeys = self._unheeded = False
        self.report()

    def start(self) -> None:
        self.dial.start()
        self._send_heartbeat()

    def send_if_welcome(self, message: Any, payload: Any = None) -> None:
        if self.welcome and self.dial.connected:
            self.dial.send(message, payload)

    def report(self) -> None:
        if self.dial.connected:
            self._send(self._daemon.report())

    def _send(self, message: Any) -> None:
        if self.dial.connected:
            self.dial.send(message)

    def _on_lost(self) -> None:
        self.welcome = False
        self._daemon.leadership.on_disconnected()

    def _send_heartbeat(self) -> None:
        self.report()
        self._daemon.later(REPORT_INTERVAL, self._send_heartbeat)

    def _on_message(self, message: Any, payload: Any) -> None:
        match message:
            case LeaderHeartbeat():
                self._obeys = self._daemon.leadership.on_heartbeat(message)
                if self._obeys:
                    self._daemon.world.monitor.obeys(self._daemon, message.term)
                    if self._unheeded:
                        self._unheeded = False
                        self.dial.reconnect_now()
            case KeepAlive():
                pass
            case Welcome() if self._obeys:
                self.welcome = True
                self._daemon.on_welcome()
            case Welcome():
                self._unheeded = True
            case _ if self.welcome:
                self._daemon.on_instruction(message, payload)


class SchedulerConnections:
    """Connections to all schedulers, like :mod:`molinkd.peer.frontend.scheduler_connections`."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._routes: dict[str, Route] = {}
        self._dials: dict[str, Dial] = {}
        self._unconfirmed: set[str] = set()

    def on_welcome(self) -> None:
        self._unconfirmed = set(self._routes)

    def update_route(self, route: Route) -> None:
        old = self._routes.get(route.pipeline)
        known = route.pipeline not in self._unconfirmed
        if old is not None and known and route.epoch < old.epoch:
            return
        self._unconfirmed.discard(route.pipeline)
        if route.is_ready:
            for pipeline in sorted(self._unconfirmed):
                same = self._routes[pipeline].model == route.model
                if same and pipeline not in route.sibling_pipelines:
                    self.remove_route(pipeline)
        if old is not None and (old.scheduler != route.scheduler or route.scheduler is None):
            self._disconnect(route.pipeline)
        self._routes[route.pipeline] = route
        if route.pipeline not in self._dials and route.scheduler is not None:
            self._connect(route)
        self._daemon.on_routes_changed()

    def remove_route(self, pipeline: str) -> None:
        self._unconfirmed.discard(pipeline)
        if self._routes.pop(pipeline, None) is not None:
            self._disconnect(pipeline)
            self._daemon.on_routes_changed()

    def targets(self, model: str) -> list[PipelineEpoch]:
        return [
            PipelineEpoch(route.pipeline, route.epoch)
            for route in self._routes.values()
            if route.is_ready
            and route.model == model
            and (dial := self._dials.get(route.pipeline)) is not None
            and dial.connected
        ]

    def send(self, target: PipelineEpoch, message: Any, payload: Any = None) -> None:
        route, dial = self._routes.get(target.pipeline), self._dials.get(target.pipeline)
        if route is None or dial is None or route.epoch != target.epoch:
            raise MolinkError("the scheduler is gone")
        dial.send(message, payload)

    @property
    def known_routes(self) -> tuple[tuple[str, int, bool], ...]:
        return tuple((one.pipeline, one.epoch, one.is_ready) for one in self._routes.values())

    def forming(self, model: str) -> int:
        return sum(
            route.forming_progress for route in self._routes.values() if route.model == model
        )

    def _connect(self, route: Route) -> None:
        assert route.scheduler is not None
        if not route.scheduler.addresses:
            return
        pipeline, world = route.pipeline, self._daemon.world
        where = world.where(route.scheduler)
        changed = self._daemon.on_routes_changed
        events = OutConnectionEvents(
            lambda message, _: self._daemon.on_scheduler_message(pipeline, message),
            changed,
            changed,
            nothing,
            nothing,
        )
        peer, key = self._daemon.peer.id, route.scheduler.peer
        dial = Dial(world.network, self._daemon, peer, lambda: where, key, events, echoes="down")
        self._dials[pipeline] = dial
        dial.start()

    def _disconnect(self, pipeline: str) -> None:
        dial = self._dials.pop(pipeline, None)
        if dial is not None:
            dial.close()
