"""A model folder's tokenizer, and settings from its configs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from molink.errors import BrokenModel, RequestError
from molink.native import raise_as
from molink.text.generation_defaults import GenerationDefaults
from molink.text.tokenizer import Tokenizer
from tests.support.models import write_modules


@pytest.fixture
def folder(tmp_path: Path, byte_tokenizer: tokenizers.Tokenizer) -> Path:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def test_without_configs(folder: Path) -> None:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.eos_ids == ()
    assert tokenizer.bos_id is None
    assert tokenizer.chat_template is None
    assert tokenizer.defaults == GenerationDefaults()
    text = "naïve 🦊 <|end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(ids) == "naïve 🦊 "
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_eos_and_defaults(folder: Path, byte_tokenizer: tokenizers.Tokenizer) -> None:
    end = byte_tokenizer.token_to_id("<|end|>")
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
    write(folder, "generation_config.json", {"eos_token_id": [7, end], "temperature": 0.6, "x": 1})
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.eos_ids == (end, 7)
    assert tokenizer.defaults.temperature == 0.6
    assert tokenizer.defaults.top_p is None


def test_eos_from_the_model_config_as_a_last_resort(folder: Path) -> None:
    write(folder, "config.json", {"eos_token_id": 5, "vocab_size": 512})
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.eos_ids == (5,)
    assert tokenizer.vocab_size == 512


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config.json", {"eos_token": "<|gone|>"}),
        ("special_tokens_map.json", {"eos_token": {"content": "<|gone|>"}}),
        ("generation_config.json", {"eos_token_id": [9999]}),
        ("config.json", {"eos_token_id": 512, "vocab_size": 512}),
    ],
)
def test_an_end_that_is_no_token_is_refused(folder: Path, file: str, value: Any) -> None:
    write(folder, file, value)
    with pytest.raises(BrokenModel, match=r"end-of-sequence token .*(gone|9999|512).* is not in"):
        Tokenizer.open(folder)
    write(folder, "generation_config.json", {"eos_token_id": [9999, 7]})
    assert 7 in Tokenizer.open(folder).eos_ids


@pytest.mark.parametrize("add", [True, False, None])
@pytest.mark.parametrize("processed", [True, False])
def test_bos(
    tmp_path: Path, byte_tokenizer: tokenizers.Tokenizer, add: bool | None, processed: bool
) -> None:
    copy = tokenizers.Tokenizer.from_str(byte_tokenizer.to_str())
    bos = copy.token_to_id("<|start|>")
    if processed:
        copy.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", bos)]
        )
    copy.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|start|>"} | ({} if add is None else {"add_bos_token": add})
    write(tmp_path, "tokenizer_config.json", config)
    tokenizer = Tokenizer.open(tmp_path)
    expected = processed if add is None else add
    assert (tokenizer.encode("hello")[0] == bos) == expected
    assert tokenizer.encode("hello").count(bos) == int(expected)
    assert tokenizer.encode("hello", special=False).count(bos) == 0


@pytest.mark.parametrize("adds_bos", [True, False, None])
@pytest.mark.parametrize("processed", ["", "<|start|> $A", "<|start|> $A <|start|>"])
def test_the_end_of_texts_to_embed(
    tmp_path: Path, byte_tokenizer: tokenizers.Tokenizer, processed: str, adds_bos: bool | None
) -> None:
    copy = tokenizers.Tokenizer.from_str(byte_tokenizer.to_str())
    start, end = (copy.token_to_id(text) for text in ("<|start|>", "<|end|>"))
    if processed:
        copy.post_processor = processors.TemplateProcessing(
            single=processed, special_tokens=[("<|start|>", start)]
        )
    copy.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|start|>", "eos_token": "<|end|>", "add_eos_token": True}
    write(tmp_path, "tokenizer_config.json", config | {"add_bos_token": adds_bos})
    # Generating models have this field by mistake.
    assert end not in Tokenizer.open(tmp_path).encode("hello")
    write_modules(
        tmp_path, ["Transformer", "Pooling"], {"1_Pooling": {"pooling_mode": "lasttoken"}}
    )
    tokenizer = Tokenizer.open(tmp_path)
    for text in ("hello", "", "a<|end|>"):
        ids, plain = tokenizer.encode(text), tokenizer.encode(text, special=False)
        if processed.count("start") == 2:  # another token ends texts
            assert ids.count(end) == plain.count(end)
        else:
            assert ids[-1 - len(plain) :] == [*plain, end]


def test_special_tokens_reach_the_template(folder: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}"
    config = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": template}
    write(folder, "tokenizer_config.json", config)
    template_of_folder = Tokenizer.open(folder).chat_template
    assert template_of_folder is not None
    assert (
        template_of_folder.render_prompt([{"role": "user", "content": "x"}]) == "<|start|><|end|>x"
    )


def test_padding_and_truncation_of_the_file_are_off(
    tmp_path: Path, byte_tokenizer: tokenizers.Tokenizer
) -> None:
    copy = tokenizers.Tokenizer.from_str(byte_tokenizer.to_str())
    copy.enable_truncation(3)
    copy.enable_padding(length=9)
    copy.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(tmp_path).encode("zzzzz") == byte_tokenizer.encode("zzzzz").ids


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "nonsense"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"top_p": 7}'),
        ("generation_config.json", '{"temperature": 1e300}'),
        ("generation_config.json", '{"repetition_penalty": 1e-300}'),
        ("generation_config.json", '{"top_k": 4294967296}'),
        ("config.json", '{"eos_token_id": "x"}'),
        ("tokenizer_config.json", '{"chat_template": "{% if"}'),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: str | None) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(BrokenModel, match=name.replace(".", r"\.")):
        Tokenizer.open(folder)


def test_text_that_is_no_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError):
        Tokenizer.open(folder).encode("\ud800")


def edited(folder: Path, **parts: Any) -> Path:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8")) | parts
    path.write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_a_panic_while_loading_names_the_file(folder: Path) -> None:
    unknown = {"SpecialToken": {"id": "nope", "type_id": 0}}
    post = {"type": "TemplateProcessing", "single": [unknown], "pair": [], "special_tokens": {}}
    with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
        Tokenizer.open(edited(folder, post_processor=post))


def test_a_panic_while_encoding_is_the_requests_failure(folder: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = Tokenizer.open(edited(folder, pre_tokenizer=split | {"invert": False}))
    assert tokenizer.encode("a")
    with pytest.raises(RequestError, match="can't be tokenized"):
        tokenizer.encode("a" * 60 + "!")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_valid_results_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), raise_as(BrokenModel):
        raise error


def test_a_panic_is_a_failure() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(BrokenModel, match="why"), raise_as(BrokenModel):
        raise panic("why")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs an endless file")
@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_an_endless_file_is_not_read(folder: Path, name: str) -> None:
    (folder / name).symlink_to("/dev/zero")
    assert Tokenizer.open(folder).chat_template is None
