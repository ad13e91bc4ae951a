"""The parts of a daemon that its node uses."""

from dataclasses import dataclass, field

import zmq.asyncio

from molink.facts.identity import derive_peer_id
from molink.swarm.membership.banned_peers import BannedPeers
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.transfers import Transfers
from molinkd.peer.home import Home
from molinkd.peer.launch import Announce
from molinkd.peer.membership.addresses import MAX_ADDRESSES, advertised_addresses
from molinkd.peer.membership.port_mapper import PortMapper
from molinkd.peer.membership.rendezvous_client import RendezvousClient
from molinkd.peer.settings import Settings


@dataclass(frozen=True, slots=True)
class Resources:
    """Keys, sockets, files and settings of a daemon."""

    settings: Settings
    home: Home
    keys: KeyPair
    context: zmq.asyncio.Context
    authenticator: ZapAuthenticator
    server: Server[ControlMessage]
    repository: ModelRepository
    banned_peers: BannedPeers
    announce: Announce
    transfers: Transfers = field(default_factory=Transfers)
    #: As in :class:`~molinkd.peer.launch.Launch`.
    pc: str = ""
    #: This PC at its rendezvous, if it has one.
    rendezvous: RendezvousClient | None = None
    #: Ports of this PC that its router forwards, if it is asked to.
    port_mapper: PortMapper | None = None

    @property
    def me(self) -> str:
        """This peer's id."""
        return derive_peer_id(self.keys.public)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which other PCs may reach this one, best first."""
        found = advertised_addresses(self.settings.host, self.settings.advertise)
        public = "" if self.port_mapper is None else self.port_mapper.address
        return (*found[: MAX_ADDRESSES - 1], public) if public else found
