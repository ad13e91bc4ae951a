"""Settings: precedence of the layers, and rejected values."""

from importlib.resources import files
from pathlib import Path

import msgspec
import platformdirs
import pytest

from molink.errors import UsageError
from molink.facts.settings import PipelineSettings
from molinkd.peer.agent.device_daemons import device_settings
from molinkd.peer.home import Home
from molinkd.peer.settings import (
    MAX_PORTS_TRIED,
    SETTING_NAMES,
    MemoryShare,
    Settings,
    load_settings,
    parse_size,
)


@pytest.fixture(autouse=True)
def no_common_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "common"
    folder.mkdir()
    monkeypatch.setattr(platformdirs, "user_config_path", lambda *_: folder)
    return folder


def test_later_layers_override(tmp_path: Path, no_common_config: Path) -> None:
    (no_common_config / "config.toml").write_text(
        'name = "common"\npipeline_wait_timeout = 5\nmax_num_seqs = 8\n', encoding="utf-8"
    )
    (tmp_path / "config.toml").write_text(
        'name = "home"\npipeline_wait_timeout = 6\n', encoding="utf-8"
    )
    settings = load_settings(
        Home(tmp_path),
        {"name": "given", "pipeline_wait_timeout": None},
        {"MOLINK_NAME": "env", "OTHER": "x"},
    )
    assert (settings.name, settings.pipeline_wait_timeout, settings.pipeline.max_num_seqs) == (
        "given",
        6.0,
        8,
    )


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
        ({"control_port": 70000}, "`control_port` is at most 65535, not 70000"),
        ({"control_port": "many"}, "`control_port` can't be 'many'"),
        ({"dtype": "f64"}, "dtype"),
        ({"device": "tpu"}, "`device` is auto, cpu, cuda:N or several .*, not 'tpu'"),
        ({"device": "auto,cpu"}, "`device` is auto, cpu, cuda:N or several"),
        ({"device": "cuda:0,cuda:1", "stage": "1-4"}, "for a PC with one `device`"),
        ({"worker_ports": "5"}, "worker_ports"),
        ({"memory": "lots"}, "the command line: memory: not a size: 'lots'"),
        ({"memory": "12XB"}, "not a size: '12XB'. Write for example 8GB"),
        ({"memory": "-1GB"}, "not a size"),
        ({"memory": "12"}, r"memory: 12 bytes\? Write 12GiB or 12MiB"),
        ({"swap_space": 4}, r"swap_space: 4 bytes\? Write 4GiB"),
        ({"memory": "0%"}, "above 0% and at most 100%, not 0%"),
        ({"memory": "150%"}, "above 0% and at most 100%, not 150%"),
        ({"memory": "100.01%"}, "at most 100%"),
        ({"memory": "-5%"}, "not a share: '-5%'. Write for example 80%"),
        ({"memory": "%"}, "not a share"),
        ({"memory": "nan%"}, "not a share"),
        ({"memory": -1}, "`memory` is at least 0"),
        ({"quantize": "int4"}, "`quantize` is one of none, int8, nf4, not 'int4'"),
        ({"kv_cache_dtype": "q8"}, "`kv_cache_dtype` is one of auto, int8, not 'q8'"),
        ({"objective": "speed"}, "`objective` is one of latency, throughput, not 'speed'"),
        ({"min_stages": 17}, "`min_stages` is at most 16"),
        ({"nonsense": 1}, "nonsense"),
        ({"advertise": "foo:1:2"}, "`advertise` takes addresses or host names.*not 'foo:1:2'"),
        ({"advertise": "10.0.0.1, 300.1.1.1"}, "not '300.1.1.1'"),
        ({"advertise": "pc:70000"}, "not 'pc:70000'"),
        ({"advertise": "two words"}, "not 'two words'"),
        ({"advertise": "0.0.0.0"}, "not '0.0.0.0'"),
        ({"name": "attic (2)"}, r"`name` has letters, digits, .* only, not 'attic \(2\)'"),
    ],
)
def test_invalid_values_are_named(options: dict[str, object], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        load_settings(Home(Path("nowhere")), options, {})


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("80%", MemoryShare(80)),
        (" 12.5 % ", MemoryShare(12.5)),
        ("12GB", 12 * 10**9),
        ("0", 0),
        (5 << 20, 5 << 20),
    ],
)
def test_memory_is_a_size_or_a_share(text: object, memory: object) -> None:
    settings = load_settings(Home(Path("nowhere")), {"memory": text}, {})
    assert settings.memory == memory
    again = msgspec.json.decode(msgspec.json.encode(settings), type=Settings)
    assert again == settings


def test_the_command_line_overrides_a_share_of_the_environment() -> None:
    environment = {"MOLINK_VRAM_BUDGET": "80%", "MOLINK_QUANTIZE": "nf4"}
    settings = load_settings(Home(Path("nowhere")), {}, environment)
    assert (settings.memory, settings.quantize) == (MemoryShare(80), "nf4")
    options = {"memory": "2GB", "quantize": "int8"}
    settings = load_settings(Home(Path("nowhere")), options, environment)
    assert (settings.memory, settings.quantize) == (2 * 10**9, "int8")
    with pytest.raises(UsageError, match=r"the environment .*: memory: .*not 150%"):
        load_settings(Home(Path("nowhere")), {}, {"MOLINK_VRAM_BUDGET": "150%"})


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
        ("1048576", 1 << 20),
        ("8GB", 8 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512mb", 512 * 10**6),
        ("2k", 2000),
    ],
)
def test_parse_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "rows"), [("auto", 0), (" AUTO", 0), ("0", 0), ("256", 256)])
def test_max_num_batched_tokens(text: str, rows: int) -> None:
    nowhere = Home(Path("nowhere"))
    assert (
        load_settings(nowhere, {"max_num_batched_tokens": text}, {}).pipeline.max_num_batched_tokens
        == rows
    )
    settings = load_settings(nowhere, {}, {"MOLINK_MAX_NUM_BATCHED_TOKENS": text})
    assert settings.pipeline.max_num_batched_tokens == rows
    assert load_settings(nowhere, {}, {}).pipeline.max_num_batched_tokens == 0


def test_micro_batches_may_be_auto() -> None:
    nowhere = Home(Path("nowhere"))
    assert load_settings(nowhere, {}, {"MOLINK_MICRO_BATCHES": "auto"}).micro_batches == 0
    assert load_settings(nowhere, {}, {"MOLINK_MICRO_BATCHES": "3"}).micro_batches == 3


@pytest.mark.parametrize(
    ("text", "count"), [("auto", -1), ("off", 0), (" OFF", 0), ("4", 4), ("15", 15)]
)
def test_num_speculative_tokens(text: str, count: int) -> None:
    settings = load_settings(Home(Path("nowhere")), {}, {"MOLINK_NUM_SPECULATIVE_TOKENS": text})
    assert settings.pipeline.num_speculative_tokens == count


@pytest.mark.parametrize("text", ["16", "-1", "many"])
def test_invalid_num_speculative_tokens(text: str) -> None:
    with pytest.raises(UsageError, match="`num_speculative_tokens` is"):
        load_settings(Home(Path("nowhere")), {}, {"MOLINK_NUM_SPECULATIVE_TOKENS": text})


def test_invalid_max_num_batched_tokens() -> None:
    for text in ("-1", "many", "1000000"):
        with pytest.raises(UsageError, match="`max_num_batched_tokens`"):
            load_settings(Home(Path("nowhere")), {"max_num_batched_tokens": text}, {})


def test_link_compression() -> None:
    nowhere = Home(Path("nowhere"))
    assert load_settings(nowhere, {}, {}).pipeline.compression == "lossless"
    for name in ("none", "lossless", "int8"):
        settings = load_settings(nowhere, {}, {"MOLINK_COMPRESSION": name})
        assert settings.pipeline.compression == name
    with pytest.raises(UsageError, match="compression"):
        load_settings(nowhere, {}, {"MOLINK_COMPRESSION": "zip"})


def test_link_recording() -> None:
    nowhere = Home(Path("nowhere"))
    assert load_settings(nowhere, {}, {}).pipeline.record == ""
    settings = load_settings(nowhere, {}, {"MOLINK_RECORD": "records"})
    assert settings.pipeline.record == str(Path.cwd() / "records"), "workers run elsewhere"


def test_link_policies() -> None:
    nowhere = Home(Path("nowhere"))
    environment = {"MOLINK_LINK_POLICY": "molink", "MOLINK_CUT_THROUGH": "false"}
    pipeline = load_settings(nowhere, {}, environment).pipeline
    assert (pipeline.link_policy, pipeline.cut_through) == ("molink", False)
    assert load_settings(nowhere, {}, {}).pipeline.cut_through
    with pytest.raises(UsageError, match=r"link.policy.* is one of concurrent, fifo"):
        load_settings(nowhere, {}, {"MOLINK_LINK_POLICY": "anyhow"})


def test_scheduling_policies(tmp_path: Path) -> None:
    nowhere = Home(tmp_path)
    assert load_settings(nowhere, {}, {}).pipeline.scheduling_policy == "fcfs"
    given = load_settings(nowhere, {"scheduling_policy": "skip-join-mlfq"}, {})
    assert given.pipeline.scheduling_policy == "skip-join-mlfq"
    complaint = "`scheduling_policy` is one of fcfs, skip-join-mlfq, .*, not 'lottery'"
    # A policy of the simulator, which needs the answers' lengths.
    with pytest.raises(UsageError, match="not 'srpt'"):
        load_settings(nowhere, {"scheduling_policy": "srpt"}, {})
    with pytest.raises(UsageError, match=rf"the environment .*{complaint}"):
        load_settings(nowhere, {}, {"MOLINK_SCHEDULING_POLICY": "lottery"})
    (tmp_path / "config.toml").write_text('scheduling_policy = "lottery"', encoding="utf-8")
    with pytest.raises(UsageError, match=rf"config\.toml: .*{complaint}"):
        load_settings(nowhere, {}, {})


def test_pipeline_settings_are_given_by_name() -> None:
    nowhere = Home(Path("nowhere"))
    assert set(PipelineSettings.__struct_fields__) < set(SETTING_NAMES)
    with pytest.raises(UsageError, match="unknown setting 'pipeline'"):
        load_settings(nowhere, {"pipeline": {}}, {})
    with pytest.raises(UsageError, match="`max_num_seqs` is at least 1, not 0"):
        load_settings(nowhere, {}, {"MOLINK_MAX_NUM_SEQS": "0"})
    settings = load_settings(nowhere, {}, {"MOLINK_PREFIX_CACHE": "false"})
    assert settings.pipeline == PipelineSettings(prefix_cache=False)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_stage_ranges() -> None:
    assert Settings(stage="1-12").stage == "1-12"
    assert Settings(stage="none").stage == "none"


def test_only_a_default_port_moves_on(tmp_path: Path) -> None:
    home = Home(tmp_path).create_folders()
    defaults = load_settings(home, {}, {})
    assert defaults.ports_to_try("control_port") == (5467, 5467 + MAX_PORTS_TRIED)
    home.config.write_text("coordinator_port = 5466", encoding="utf-8")
    chosen = load_settings(home, {"api_port": 5465}, {}, {"control_port": 65535})
    assert chosen.ports_to_try("api_port") == (5465, 5466), "the number of the default, but chosen"
    assert chosen.ports_to_try("control_port") == (65535, 65536)
    assert chosen.chosen_ports == ("api_port", "control_port", "coordinator_port")
    environment = load_settings(home, {}, {"MOLINK_API_PORT": "0"})
    assert environment.ports_to_try("api_port") == (0, 1)
    assert device_settings(chosen, "cuda:1").ports_to_try("control_port")[1] == 65536
    with pytest.raises(UsageError, match="unknown setting 'chosen_ports'"):
        load_settings(home, {}, {}, {"chosen_ports": "x"})


def test_the_example_is_valid(tmp_path: Path) -> None:
    example = files("molink.configs") / "examples" / "config.toml"
    (tmp_path / "config.toml").write_bytes(example.read_bytes())
    settings = load_settings(Home(tmp_path), {}, {})
    assert (settings.name, settings.pipeline_wait_timeout) == ("attic", 60.0)
    assert settings.allowed_hosts == ("llm.home.example",)


def test_several_devices_are_comma_separated(tmp_path: Path) -> None:
    settings = load_settings(Home(tmp_path), {"device": "cuda:1, cpu"}, {})
    assert settings.device == "cuda:1,cpu"
    assert settings.devices == ("cuda:1", "cpu")


def test_api_keys_have_names(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[api_keys]\nphone = "a=b"\n', encoding="utf-8")
    assert load_settings(Home(tmp_path), {}, {}).api_keys == {"phone": "a=b"}
    given = {"MOLINK_API_KEYS": "phone=a=b, attic=c", "MOLINK_CORS_ORIGINS": "https://a.b, app://*"}
    settings = load_settings(Home(tmp_path), {}, given)
    assert settings.api_keys == {"phone": "a=b", "attic": "c"}
    assert settings.cors_origins == ("https://a.b", "app://*")
    for wrong in ("secret", "my phone=secret", "=secret"):
        with pytest.raises(UsageError, match="api_keys") as reported:
            load_settings(Home(tmp_path), {}, {"MOLINK_API_KEYS": wrong})
        assert "secret" not in str(reported.value)


def test_adapters_have_names_and_absolute_folders(tmp_path: Path) -> None:
    poet, clerk = (str(Path(name).absolute()) for name in ("poet", "some=clerk"))
    (tmp_path / "config.toml").write_text('[adapters]\nx.y = "poet"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="`adapters` is NAME=FOLDER"):
        load_settings(Home(tmp_path), {}, {})
    (tmp_path / "config.toml").write_text('[adapters]\npoet = "poet"\n', encoding="utf-8")
    assert load_settings(Home(tmp_path), {}, {}).adapters == {"poet": poet}
    listed = {"poet": poet, "clerk": clerk}
    given = ["poet=poet", "clerk=some=clerk"]
    for options, environment in (
        ({"adapters": given}, {}),
        ({}, {"MOLINK_ADAPTERS": "poet=poet, clerk=some=clerk"}),
    ):
        assert load_settings(Home(tmp_path), options, environment).adapters == listed
    assert load_settings(Home(tmp_path), {}, {}, {"adapters": given}).adapters == listed
    for wrong in (["poet"], ["=a"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(UsageError, match=r"the command line: .*`adapters`") as reported:
            load_settings(Home(tmp_path), {"adapters": wrong}, {})
        assert "\n" not in str(reported.value)
    with pytest.raises(UsageError, match="`adapters`"):
        load_settings(Home(tmp_path), {"adapters": [f"a{n}=b" for n in range(33)]}, {})
