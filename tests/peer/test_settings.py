"""Settings: the order of the layers, and what is refused."""

from pathlib import Path

import platformdirs
import pytest

from molink.errors import UsageError
from molink.peer.home import Home
from molink.peer.settings import Settings, load_settings, parse_size, port_range


@pytest.fixture(autouse=True)
def no_common_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "common"
    folder.mkdir()
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_: folder)
    return folder


def test_later_layers_win(tmp_path: Path, no_common_config: Path) -> None:
    (no_common_config / "config.toml").write_text(
        'name = "common"\nhold = 5\nmax_running = 8\n', encoding="utf-8"
    )
    (tmp_path / "config.toml").write_text('name = "home"\nhold = 6\n', encoding="utf-8")
    settings = load_settings(
        Home(tmp_path), {"name": "given", "hold": None}, {"MOLINK_NAME": "env", "OTHER": "x"}
    )
    assert (settings.name, settings.hold, settings.max_running) == ("given", 6.0, 8)


def test_text_is_converted() -> None:
    settings = load_settings(
        Home(Path("nowhere")),
        {},
        {
            "MOLINK_VRAM_BUDGET": "6GiB",
            "MOLINK_WORKER_PORTS": "6000-6010",
            "MOLINK_ADVERTISE": "10.0.0.2, pc.example",
            "MOLINK_CONTROL_PORT": "7000",
        },
    )
    assert settings.memory == 6 << 30
    assert settings.worker_ports == (6000, 6010)
    assert settings.advertise == ("10.0.0.2", "pc.example")
    assert settings.control_port == 7000


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"stage": "5:3"}, "stage"),
        ({"stage": "some"}, "stage"),
        ({"control_port": 70000}, "--control-port is at most 65535, not 70000"),
        ({"control_port": "many"}, "--control-port can't be 'many'"),
        ({"dtype": "f64"}, "dtype"),
        ({"device": "tpu"}, "--device is auto, cpu or cuda:N, not 'tpu'"),
        ({"worker_ports": "5"}, "worker_ports"),
        ({"memory": "lots"}, "size"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, object], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        load_settings(Home(Path("nowhere")), options, {})


def test_broken_toml_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("name = ", encoding="utf-8")
    with pytest.raises(UsageError, match=r"config\.toml"):
        load_settings(Home(tmp_path), {}, {})


def test_unknown_key_of_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("nam = 1", encoding="utf-8")
    with pytest.raises(UsageError, match=r"config\.toml.*nam"):
        load_settings(Home(tmp_path), {}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("8GB", 8 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512mb", 512 * 10**6),
        ("2k", 2000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_stage_ranges() -> None:
    assert Settings(stage="0:12").stage == "0:12"
    assert Settings(stage="none").stage == "none"


def test_port_ranges() -> None:
    assert port_range(0) == (0, 1)
    assert port_range(5467)[0] == 5467
    assert port_range(65535) == (65535, 65536)
