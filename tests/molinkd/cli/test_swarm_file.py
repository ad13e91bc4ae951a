"""``swarm.toml``: errors name their line, and nothing is guessed."""

from pathlib import Path

import pytest

from molink.errors import UsageError
from molinkd.cli.swarm_file import MAX_BYTES, model_entries, read_swarm_file, served_name

GOOD = """\
molink = "1.2"

[[models]]
model = "Qwen/Qwen3-0.6B"   # of the hub
replicas = 2
min_stages = 2
objective = "throughput"
quantize = "int8"
kv_cache_dtype = "int8"

[[models]]
model = "tiny"
layers = { first = "1-2", attic = "3-6" }

[[models]]
model = "molink-demo"
pcs = ["den", "loft"]
adapters = { poet = "poets/one" }
[models.layers]
den = "1-2"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "swarm.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_fields_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    found, lines = read_swarm_file(write(tmp_path, GOOD))
    assert found.molink == "1.2"
    hub, folder, demo = model_entries(found, lines, tmp_path)
    assert (hub.source, hub.replicas, hub.min_stages) == ("Qwen/Qwen3-0.6B", 2, 2)
    assert (hub.objective, hub.quantize, hub.dtype) == ("throughput", "int8", "auto")
    assert (hub.kv_cache_dtype, folder.kv_cache_dtype) == ("int8", "auto")
    assert folder.source == str((tmp_path / "tiny").resolve())
    assert folder.pins == (("first", "1-2"), ("attic", "3-6"))
    assert demo.source == "molink-demo"
    assert demo.pins == (("den", "1-2"), ("loft", "auto"))
    assert demo.adapters == {"poet": str(tmp_path / "poets" / "one")}
    assert not hub.adapters
    assert [served_name(one.model) for one in found.models] == ["Qwen3-0.6B", "tiny", "molink-demo"]
    assert [lines.find_line(index) for index in range(3)] == [3, 11, 15]
    assert served_name("/some/where/tiny/") == "tiny"


M = '[[models]]\nmodel = "a"\n'


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "models is missing"),
        ("models = []", 1, "no models"),
        ("molink = 3\n" + M, 1, "molink: expected `str`"),
        ("x = 1\n" + M, 1, "unknown key x; available: models, molink"),
        (M + "replica = 2", 3, "unknown key replica; available: model, replicas"),
        (M + M.replace("a", "b") + "replicas = 0", 5, "replicas: expected `int` >= 1"),
        (M + "min_stages = 17", 3, "min_stages: expected `int` <= 16"),
        (M + 'objective = "speed"', 3, "objective: invalid enum value 'speed'. Choices:"),
        (M + 'dtype = "f8"', 3, "'f8'. Choices: auto, f32, bf16, f16"),
        (M + "quantize = 8", 3, "quantize: expected `str`"),
        ("[[models]]\nreplicas = 2", 1, "model is missing"),
        (M + "replicas = ", 3, "invalid TOML: Invalid value"),
        (M + "\n\n" + M, 6, "duplicate model a"),
        (M + '[[models]]\nmodel = "b/a"', 4, "duplicate model a"),
        (M + 'pcs = ["x", "x"]', 3, "a PC is pinned twice"),
        (M + 'replicas = 2\nlayers = { x = "1-2" }', 4, "layers can't be assigned with 2 replicas"),
        (M + 'layers = { x = "0-2" }', 3, "layers of x must be A-B, such as 1-12, not 0-2"),
        (M + '[models.layers]\nx = "2:2"', 3, "layers of x must be A-B, such as 1-12, not 2:2"),
        (M + 'pcs = ["y"]\nlayers = { x = "1-2" }', 4, "x has layers but is not in pcs"),
        (M + 'adapters = { a = "x" }', 3, "adapter a has the name of a model"),
        (M + "adapters = 3", 3, "adapters: expected `object`"),
        (
            M + '[models.adapters]\nx = "x"\n' + M.replace("a", "b") + 'adapters = { x = "y" }',
            7,
            "adapter x has the name of a model or of another adapter",
        ),
        (M + "replicas = 5\n" + M.replace("a", "b") + "replicas = 4", 6, "9 pipelines"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_swarm_file(path)
    said = str(caught.value)
    assert said.startswith(f"{path}, line {line}: ")
    assert why in said


def test_an_unknown_model(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    found, lines = read_swarm_file(path)
    with pytest.raises(UsageError, match="line 12: tiny is not a folder"):
        model_entries(found, lines, tmp_path)


def test_a_short_name_is_expanded(tmp_path: Path) -> None:
    found, lines = read_swarm_file(write(tmp_path, '[[models]]\nmodel = "qwen3:8b"\n'))
    (entry,) = model_entries(found, lines, tmp_path)
    assert entry.source == "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
    assert served_name("qwen3:8b") == "Qwen3-8B-Q4_K_M"
    (tmp_path / "qwen3").mkdir()
    found, lines = read_swarm_file(write(tmp_path, '[[models]]\nmodel = "qwen3"\n'))
    (entry,) = model_entries(found, lines, tmp_path)
    assert entry.source == str((tmp_path / "qwen3").resolve())


def test_files_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        read_swarm_file(tmp_path / "nothing.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="can't be read"):
        read_swarm_file(binary)
    with pytest.raises(UsageError, match="longer than"):
        read_swarm_file(write(tmp_path, "#" * (MAX_BYTES + 1)))


def test_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(b"GGUF")
    for model, source, name in (
        ("tiny.Q4_0.gguf", str((tmp_path / "tiny.Q4_0.gguf").resolve()), "tiny.Q4_0"),
        ("owner/name/big.gguf", "owner/name/big.gguf", "big"),
    ):
        found, lines = read_swarm_file(write(tmp_path, f'[[models]]\nmodel = "{model}"\n'))
        assert [one.source for one in model_entries(found, lines, tmp_path)] == [source]
        assert served_name(model) == name
