"""Creates congestion controls by name."""

from molink.errors import UsageError
from molink.sim.congestion.base import CONGESTION_CONTROLS, CongestionController
from molink.sim.congestion.bbr import BbrTcp
from molink.sim.congestion.cubic import CubicTcp, PacedCubicTcp
from molink.wire.messages.data_plane import Channel


def create_controller(
    name: str, round_trip: float, channel: Channel = Channel.BULK
) -> CongestionController:
    """Create the congestion control of a connection whose handshake took ``round_trip`` seconds.

    As in :mod:`molink.wire.sockets.tcp_info`, the decode channel soon replaces BBR by paced CUBIC,
    and the bulk channel is always paced.

    Raises:
        UsageError: the name is unknown.
    """
    match name:
        case "cubic" if channel is Channel.BULK:
            return PacedCubicTcp(round_trip)
        case "cubic":
            return CubicTcp()
        case "bbr" if channel is Channel.DECODE:
            return PacedCubicTcp(round_trip)
        case "bbr":
            return BbrTcp(round_trip)
    raise UsageError(
        f"no congestion control {name!r}: choose one of {', '.join(CONGESTION_CONTROLS)}"
    )
