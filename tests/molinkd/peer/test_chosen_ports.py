"""Ports that the user chose are checked before anything slow starts."""

import socket
from pathlib import Path

import pytest

from molink.errors import PortInUse
from molinkd.peer.chosen_ports import check_chosen_ports
from molinkd.peer.home import Home
from molinkd.peer.settings import load_settings


@pytest.mark.parametrize(
    ("name", "options"),
    [("api_port", "--api-port (or --port)"), ("control_port", "--control-port")],
)
def test_a_chosen_port_in_use_names_its_option(tmp_path: Path, name: str, options: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = load_settings(Home(tmp_path), {name: port, "host": "127.0.0.1"}, {})
        with pytest.raises(PortInUse) as raised:
            check_chosen_ports(settings)
        assert f"port {port} is in use" in str(raised.value)
        assert options in str(raised.value)
    check_chosen_ports(settings)


def test_ports_that_nobody_chose_are_not_checked(tmp_path: Path) -> None:
    settings = load_settings(Home(tmp_path), {}, {})
    with socket.socket() as taken:
        if taken.connect_ex(("127.0.0.1", settings.api_port)):
            taken.bind(("127.0.0.1", settings.api_port))
            taken.listen()
        check_chosen_ports(settings)
