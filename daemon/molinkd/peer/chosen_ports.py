"""Checks ports that the user chose before anything slow starts."""

import errno

from molink.errors import PortInUse
from molinkd.peer.membership.addresses import is_wildcard
from molinkd.peer.settings import Settings
from molinkd.splice import listen_on_free_port

_IN_USE = (errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES))


def check_chosen_ports(settings: Settings) -> None:
    """Check that the ports chosen for the endpoint and for other PCs are free at this moment.

    Raises:
        PortInUse: one is not; names its option.
    """
    for name, host, option in (
        ("api_port", settings.api_host, "--api-port (or --port)"),
        ("control_port", settings.host, "--control-port"),
    ):
        port: int = getattr(settings, name)
        if name not in settings.chosen_ports or not port:
            continue
        try:
            listen_on_free_port("" if is_wildcard(host) else host, port, 1, 1).close()
        except OSError as error:
            if error.errno in _IN_USE:
                text = f"port {port} is in use (or not permitted) on {host}"
                raise PortInUse(f"{text}: choose another with {option}") from None
