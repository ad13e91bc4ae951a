import msgspec

from molink.swarm.reach import Reach, Unreachable, how_to_open
from tests.support.swarm import Kit


def test_who_cannot_be_reached_by_those_before_it_is_left_out() -> None:
    reach = Reach()
    assert reach.left_out("abc") == {}
    reach.tried("a", "b", ok=False)
    reach.tried("b", "c", ok=False)
    assert reach.left_out("abc") == {"b": Unreachable("b", "a", "b")}
    assert reach.left_out("cba") == {"b": Unreachable("b", "b", "c")}
    reach.tried("a", "b", ok=True)
    assert reach.left_out("abc") == {"c": Unreachable("c", "b", "c")}
    reach.forget("b")
    assert reach.left_out("abc") == {}


def test_the_command_that_opens_the_ports(kit: Kit) -> None:
    report = kit.report("a")
    linux = msgspec.structs.replace(report, system="linux", worker_ports=(5468, 5479))
    assert how_to_open(linux) == (
        "sudo ufw allow 5467/tcp && sudo ufw allow 5468:5479/tcp (or: sudo firewall-cmd "
        "--add-port=5467/tcp --add-port=5468-5479/tcp)"
    )
    windows = msgspec.structs.replace(linux, system="win32")
    assert "-LocalPort 5467,5468-5479 -Action Allow" in how_to_open(windows)
    assert "5467,5468 " in how_to_open(msgspec.structs.replace(windows, worker_ports=(5468, 5468)))
    assert "-LocalPort 5467 " in how_to_open(msgspec.structs.replace(windows, worker_ports=(0, 0)))
