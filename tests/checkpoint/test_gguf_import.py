"""A GGUF file is imported to a model folder once; inconsistent ones are refused before a write."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from molink.checkpoint.gguf_import import import_gguf, read_gguf_model
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import ModelSource, find_model
from molink.checkpoint.model_task import ModelTask
from molink.checkpoint.rope import RopeConfig
from molink.errors import BrokenModel, ModelError, Unavailable, UnsupportedModel
from molink.text.tokenizer import Tokenizer
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import MakeModel, add_draft_layer


@pytest.fixture(scope="module")
def folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", 1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf", Kind.Q8_0)


def unpack(path: Path, into: Path) -> Path:
    return import_gguf(path, into, NullCounter(), threading.Event())


def test_a_folder_as_large_as_the_file(folder: Path, whole: Path, tmp_path: Path) -> None:
    made = unpack(whole, tmp_path)
    opened, before = ModelFolder.open(made), ModelFolder.open(folder)
    kept = ("family", "heads", "kv_heads", "head_dim", "layers", "rope", "vocab_size")
    for field in kept:
        assert getattr(opened.config, field) == getattr(before.config, field)
    name = "model.layers.1.mlp.down_proj.weight.q8_0"
    assert (opened.tensors[name].dtype, opened.tensors[name].shape) == ("U8", (64, 3 * 34))
    size = (made / "model.safetensors").stat().st_size
    assert abs(size - whole.stat().st_size) < 32_000
    wanted = opened.stage_tensors(1, 2)
    assert name in wanted
    assert not any(".layers.0." in one for one in wanted)


@pytest.mark.parametrize("appends", [False, True])
def test_an_embedding_model(make_model: MakeModel, tmp_path: Path, appends: bool) -> None:
    folder = make_model(tmp_path / "model", "qwen3", 1, tie_word_embeddings=True)
    fields = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": appends}
    made = unpack(write_gguf(folder, tmp_path / "tiny.gguf", metadata=fields), tmp_path)
    opened = ModelFolder.open(made)
    assert opened.config.task == ModelTask("embed")
    assert "lm_head.weight" not in opened.stage_tensors(2, 3)
    tokenizer, before = Tokenizer.open(made), Tokenizer.open(folder)
    assert tokenizer.encode("a fox") == [*before.encode("a fox"), *before.eos_ids][: 5 + appends]
    assert tokenizer.encode("a fox", special=False) == before.encode("a fox")


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"qwen3.pooling_type": 1}, UnsupportedModel, "pooling_type 1 is not supported"),
        ({"qwen3.pooling_type": 4}, UnsupportedModel, "pooling_type 4 is not supported"),
        ({"qwen3.pooling_type": "last"}, BrokenModel, "pooling_type"),
        (
            {
                "qwen3.pooling_type": 3,
                "tokenizer.ggml.add_eos_token": True,
                "tokenizer.ggml.eos_token_id": 999,
            },
            BrokenModel,
            "eos_token_id",
        ),
    ],
)
def test_other_pooling_is_refused(
    make_model: MakeModel,
    tmp_path: Path,
    fields: dict[str, Any],
    error: type[ModelError],
    reason: str,
) -> None:
    folder = make_model(tmp_path / "model", "qwen3", 1, tie_word_embeddings=True)
    path = write_gguf(folder, tmp_path / "tiny.gguf", metadata=fields)
    with pytest.raises(error, match=reason):
        unpack(path, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_the_mtp_layer_is_kept(make_model: MakeModel, tmp_path: Path) -> None:
    folder = add_draft_layer(make_model(tmp_path / "model", "glm4_moe", 1))
    opened = ModelFolder.open(unpack(write_gguf(folder, tmp_path / "tiny.gguf"), tmp_path))
    before = ModelFolder.open(folder)
    assert (opened.config.layers, opened.config.experts) == (3, before.config.experts)
    assert opened.config.mtp == before.config.mtp
    assert {*opened.stage_tensors(2, 3)} == {*before.stage_tensors(2, 3)}
    # Shared tensors such as the embedding and the output head are not copied.
    assert {*opened.tensors} == {*before.stage_tensors(0, 3)}
    for key, value, refusal in (
        ("nextn_predict_layers", 4, "leave none of 4 layers"),
        ("nextn_predict_layers", 2, "does not fit its metadata"),
        ("expert_gating_func", 1, r"expert_gating_func 1 is not supported \(only 2"),
        ("expert_count", 9, "has 8 experts, unlike its metadata"),
        ("leading_dense_block_count", 0, r"the tensor for model\.layers\.0\.\S+ is missing"),
    ):
        path = write_gguf(folder, tmp_path / "bad.gguf", metadata={f"glm4moe.{key}": value})
        with pytest.raises((BrokenModel, UnsupportedModel), match=refusal):
            unpack(path, tmp_path)


def test_gates_and_ups_in_two_files_alternate(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gpt_oss", 1, num_hidden_layers=1)
    whole = write_gguf(folder, tmp_path / "whole.gguf", Kind.MXFP4)
    parts = write_gguf(folder, tmp_path / "parts.gguf", Kind.MXFP4, part=1)
    found = load_file(unpack(whole, tmp_path) / "model.safetensors")
    again = load_file(unpack(parts, tmp_path) / "model.safetensors")
    assert found.keys() == again.keys()
    assert all((found[name] == again[name]).all() for name in found)


def test_ups_without_gates_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gpt_oss", 1, num_hidden_layers=1)
    path = write_gguf(folder, tmp_path / "tiny.gguf", others={"ffn_up_exps.weight": Kind.Q8_0})
    with pytest.raises(
        BrokenModel, match=r"ffn_gate_exps\.weight and that of ffn_up_exps don't match"
    ):
        unpack(path, tmp_path)
    stored = path.read_bytes().replace(b"blk.0.ffn_up_exps.bias", b"blk.0.ffn_up_expt.bias")
    path.write_bytes(stored.replace(b"blk.0.ffn_up_exps.weight", b"blk.0.ffn_up_expt.weight"))
    with pytest.raises(BrokenModel, match="don't match"):
        unpack(path, tmp_path)


def test_latents_that_contradict_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "deepseek_v3", 1)
    opened = ModelFolder.open(unpack(write_gguf(folder, tmp_path / "tiny.gguf"), tmp_path))
    assert opened.config.latent == replace(ModelFolder.open(folder).config.latent, is_split=True)
    for key, value, refusal in (
        ("rope.dimension_count", 32, "leaves nothing of keys of 32 dimensions"),
        (
            "attention.kv_lora_rank",
            40,
            r"kv_a_layernorm\.weight is F32 \[48\], but .* demand \[40\]",
        ),
        ("attention.value_length_mla", 16, r"the tensor for model\.layers\.0\.self_attn\.o_proj"),
        ("expert_gating_func", 1, "expert_gating_func 1 is not supported"),
    ):
        path = write_gguf(folder, tmp_path / "bad.gguf", metadata={f"deepseek2.{key}": value})
        with pytest.raises((BrokenModel, UnsupportedModel), match=refusal):
            unpack(path, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rest = {name: one for name, one in tensors.items() if "e_score_correction_bias" not in name}
    save_file(rest, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"expert_gating_func 2 is not supported \(only 1"):
        unpack(write_gguf(folder, tmp_path / "second.gguf"), tmp_path)


def test_how_to_sample_is_what_the_file_says(folder: Path, tmp_path: Path) -> None:
    said = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": -1.0, "penalty_repeat": 1.05}
    metadata = {f"general.sampling.{name}": value for name, value in said.items()}
    path = write_gguf(folder, tmp_path / "said.gguf", metadata=metadata)
    defaults = Tokenizer.open(unpack(path, tmp_path)).defaults
    assert (defaults.top_k, defaults.min_p) == (20, 0.0)
    found = (defaults.temperature, defaults.top_p, defaults.repetition_penalty)
    assert found == pytest.approx((0.7, 0.8, 1.05))
    for value in (float("nan"), "warm"):
        metadata["general.sampling.temp"] = value
        with pytest.raises(BrokenModel, match=r"general\.sampling\.temp"):
            unpack(write_gguf(folder, tmp_path / f"{value}.gguf", metadata=metadata), tmp_path)


def test_nothing_is_said_of_sampling(whole: Path, tmp_path: Path) -> None:
    assert Tokenizer.open(unpack(whole, tmp_path)).defaults.temperature is None


def test_the_tokenizer_and_the_template_are_those_of_the_file(
    folder: Path, whole: Path, tmp_path: Path
) -> None:
    ours, theirs = Tokenizer.open(unpack(whole, tmp_path)), Tokenizer.open(folder)
    text = "Hello, wörld!  12\n\n<|im_start|>x<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == (258, 256)  # the usual end-of-answer token is added
    assert ours.special_ids == theirs.special_ids
    messages = [{"role": "user", "content": "hi"}]
    assert ours.chat_template is not None
    assert theirs.chat_template is not None
    assert ours.chat_template.render_prompt(messages) == theirs.chat_template.render_prompt(
        messages
    )


def test_a_folder_is_reused_until_the_file_changes(
    folder: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole.read_bytes())
    made = unpack(path, tmp_path / "into")
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert unpack(path, tmp_path / "into") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(folder, path, Kind.Q4_0)
    assert unpack(path, tmp_path / "into") != made


def test_an_unpacking_that_is_stopped_leaves_nothing(whole: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Unavailable):
        import_gguf(whole, tmp_path, NullCounter(), stop)
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_is_full(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molink.checkpoint.disk_space.DISK_RESERVE_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=r"tiny.gguf needs .* GB more on the disk"):
        unpack(whole, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_found_by_name(whole: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    made = find_model(str(whole), unpack_into=into)
    assert made == ModelSource("tiny", unpack(whole, into))
    beside = tmp_path / "mine"
    beside.mkdir()
    (beside / "a.gguf").write_bytes(whole.read_bytes())
    tower = beside / "mmproj-a.gguf"
    tower.write_bytes(b"images")
    with pytest.raises(BrokenModel, match=r"mmproj-a\.gguf: truncated"):
        find_model(str(beside), unpack_into=into)
    tower.unlink()
    assert find_model(str(beside), unpack_into=into).name == "mine"
    (beside / "b.gguf").write_bytes(b"another")
    with pytest.raises(ModelError, match=r"2 GGUF files \(a.gguf, b.gguf\): name one"):
        find_model(str(beside), unpack_into=into)


REFUSED: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "architecture": ({"general.architecture": "mamba"}, UnsupportedModel, "'mamba' is not supp"),
    "adapter": ({"general.type": "adapter"}, UnsupportedModel, "holds 'adapter'"),
    "split": (
        {"split.count": 3},
        BrokenModel,
        "part 1 of 3 of a model, but its name doesn't say so",
    ),
    "layers": ({"llama.block_count": 3}, BrokenModel, r"layers\.2\."),
    "fewer layers": ({"llama.block_count": 1}, BrokenModel, r"model\.layers\.1\S+ does not fit"),
    "no layers": ({"llama.block_count": 0}, BrokenModel, "llama.block_count"),
    "absurd layers": ({"llama.block_count": 2**30}, BrokenModel, "llama.block_count"),
    "a long token": ({"tokenizer.ggml.tokens": ["a" * 1025]}, BrokenModel, "of 1025 characters"),
    "width": ({"llama.embedding_length": 128}, BrokenModel, "metadata demand"),
    "heads": ({"llama.attention.head_count": 7}, BrokenModel, "heads|multiple"),
    "value heads": (
        {"llama.attention.value_length": 8},
        UnsupportedModel,
        "attention.value_length",
    ),
    "a text for a number": ({"llama.context_length": "long"}, BrokenModel, "llama.context_length"),
    "no number": (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        BrokenModel,
        "layer_norm_rms_epsilon",
    ),
    "rope": ({"llama.rope.scaling.type": "odd"}, UnsupportedModel, "scaling.type 'odd'"),
    "too much rope": (
        {"llama.rope.dimension_count": 32},
        BrokenModel,
        r"llama\.rope\.dimension_count 32 contradict",
    ),
    "partial rope": ({"llama.rope.dimension_count": 8}, UnsupportedModel, "partial_rotary"),
    "tokenizer": ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "'t5' is not supported"),
    "words": ({"tokenizer.ggml.pre": "odd"}, UnsupportedModel, "pre 'odd' is not supported"),
    "no scores": ({"tokenizer.ggml.model": "llama"}, BrokenModel, "scores is missing"),
    "token types": ({"tokenizer.ggml.token_type": [1, 2]}, BrokenModel, "list of 260 finite"),
    "token twice": ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, BrokenModel, "'a' twice"),
    "too many tokens": (
        {"tokenizer.ggml.tokens": [str(index) for index in range(321)]},
        BrokenModel,
        "321 tokens, but the embedding 320 rows",
    ),
    "merges": ({"tokenizer.ggml.merges": ["ab"]}, BrokenModel, "'ab', which is not a pair"),
    "merges of nothing": (
        {"tokenizer.ggml.merges": ["zz yy"]},
        BrokenModel,
        "its tokenizer can't be created",
    ),
    "no such token": ({"tokenizer.ggml.bos_token_id": 9999}, BrokenModel, "bos_token_id is 9999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(folder: Path, tmp_path: Path, name: str) -> None:
    metadata, kind, reason = REFUSED[name]
    path = write_gguf(folder, tmp_path / "odd.gguf", metadata=metadata)
    with pytest.raises(kind, match=reason) as raised:
        unpack(path, tmp_path / "into")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "into").exists()


def test_a_tensor_of_another_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(folder, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ssm_up.weight"))
    with pytest.raises(BrokenModel, match=r"blk\.1\.ssm_up\.weight is unknown in a"):
        unpack(path, tmp_path / "into")


@settings(max_examples=50)
@given(data=st.data())
def test_any_bytes_are_a_model_or_refused(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(whole.read_bytes())
    header = raw.index(b"blk.1.") + 3000
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        value = data.draw(st.integers(0, 255) | st.binary(min_size=8, max_size=8))
        raw[at : at + 8] = _patched(raw[at : at + 8], value)
    cut = data.draw(st.none() | st.integers(0, len(raw)))
    path = tmp_path_factory.mktemp("fuzz") / "odd.gguf"
    path.write_bytes(raw if cut is None else raw[:cut])
    try:
        made = unpack(path, path.parent / "into")
    except ModelError:
        return
    ModelFolder.open(made)
    json.loads((made / "config.json").read_text(encoding="utf-8"))


def _patched(before: bytearray, value: int | bytes) -> bytes:
    return value if isinstance(value, bytes) else bytes([value]) + bytes(before[1:])


def test_llama_3_divides_the_frequencies_itself(folder: Path, tmp_path: Path) -> None:
    divisors = (1.0, 1.0, 1.5, 2.0, 8.0, 8.0, 8.0, 8.0)
    path = write_gguf(folder, tmp_path / "rope.gguf", divisors=divisors)
    rope = ModelFolder.open(unpack(path, tmp_path / "into")).config.rope
    assert rope.kind == "longrope"
    assert rope.short_factor == rope.long_factor == divisors
    assert rope.attention_factor == 1.0


def test_yarn_is_as_the_file_says(folder: Path, tmp_path: Path) -> None:
    said = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    told = {**said, "yarn_beta_fast": 16.0, "yarn_attn_factor": 1.25, "yarn_log_multiplier": 0.5}

    def rope(path: str, scaling: dict[str, Any]) -> RopeConfig:
        metadata = {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
        written = write_gguf(folder, tmp_path / path, metadata=metadata)
        return ModelFolder.open(unpack(written, tmp_path / "into")).config.rope

    usual = rope("usual.gguf", said)
    assert (usual.kind, usual.factor, usual.original_context) == ("yarn", 4.0, 64)
    assert (usual.attention_factor, usual.beta_fast, usual.mscale) == (None, 32.0, 0.0)
    assert rope("told.gguf", told) == replace(
        usual, attention_factor=1.25, beta_fast=16.0, mscale=1.0, mscale_all_dim=0.5
    )
    with pytest.raises(UnsupportedModel, match=r"yarn_ext_factor 0\.5 is not supported"):
        rope("odd.gguf", {**said, "yarn_ext_factor": 0.5})


def test_mistral_small_is_a_llama(folder: Path, whole: Path, tmp_path: Path) -> None:
    name = "mistral3"
    path = write_gguf(folder, tmp_path / "tiny.gguf", Kind.Q8_0, architecture=name)
    made, before = unpack(path, tmp_path / "into"), unpack(whole, tmp_path)
    for file in ("config.json", "model.safetensors"):
        assert (made / file).read_bytes() == (before / file).read_bytes()


def test_config_and_tensors_alone_are_those_of_the_folder(whole: Path, tmp_path: Path) -> None:
    before = ModelFolder.open(unpack(whole, tmp_path)).config
    config, tensors = read_gguf_model(whole)
    assert replace(config, eos_ids=before.eos_ids) == before
    assert tensors.keys() == ModelFolder.open(unpack(whole, tmp_path)).tensors.keys()


def test_recurrent_layers_by_an_interval_or_by_a_list(
    make_model: MakeModel, tmp_path: Path
) -> None:
    for name, fields, recurrent in (
        ("period", {"layer_types": None}, {0, 1, 2}),
        ("list", {}, {0, 1, 3}),
    ):
        folder = make_model(tmp_path / name, "qwen3_5_text", 3, **fields)
        made = unpack(write_gguf(folder, tmp_path / f"{name}.gguf"), tmp_path / f"{name} unpacked")
        config = ModelFolder.open(made).config
        assert (config.recurrent_layers, config.family) == (recurrent, "qwen3_5_text")
        assert (config.recurrent.is_tiled, config.recurrent.has_decays) == (True, True)
    for key, value, told in (
        ("ssm.inner_size", 121, "ssm.inner_size 121 is not a multiple of"),
        ("ssm.group_count", 4, "linear_num_value_heads 6 is not a multiple of"),
        ("attention.recurrent_layers", [True, False], "a list of 4 numbers"),
    ):
        path = write_gguf(folder, tmp_path / "bad.gguf", metadata={f"qwen35.{key}": value})
        with pytest.raises(BrokenModel, match=told):
            unpack(path, tmp_path / "bad")
