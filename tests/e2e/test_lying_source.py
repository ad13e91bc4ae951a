"""The model's provider alters the bytes it sends: another source is asked, the liar is named."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.model_folder import ModelFolder
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools

PROMPT = [{"role": "user", "content": "Is that what you were sent?"}]
TOKENS = 40


@pytest.fixture
def model(tmp_path: Path, make_model: MakeModel) -> Path:
    return make_model(tmp_path / "brought", "qwen2", 1)


@pytest.fixture
def joiner(tmp_path: Path, tools: type[Tools], model: Path) -> Iterator[Process]:
    """The one PC with a stage; two others have the files, and the first of them lies."""
    options = tools.local_options("--coordinator-port", "0")
    files_only = ["--stage", "none", "--model", str(model), *options]
    with ExitStack() as stack:

        def start(name: str, *arguments: str, module: str = "molinkd") -> Process:
            arguments = (*arguments, "--name", name)
            process = Process(tmp_path / name, arguments, module)
            stack.callback(process.stop)
            tools.wait_for(process.home.membership.exists, process)
            return process

        def token() -> str:
            return tools.run_molink(tmp_path / "liar", "invite").stdout.strip()

        first = start(
            "liar", "up", "--dtype", "f32", *files_only, module="tests.support.altering_peer"
        )
        first.found()
        start("honest", "join", token(), *files_only).found()
        yield start("joiner", "join", token(), *options)


def answered_by_transformers(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = reference.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    made = output[0, inputs["input_ids"].shape[1] :]
    text: str = tokenizer.decode(made, skip_special_tokens=True)
    return text


def tensors(folder: Path) -> dict[str, bytes]:
    """All tensors of a model's files."""
    found = {}
    for name, span in ModelFolder.open(folder).tensors.items():
        with (folder / span.file).open("rb") as file:
            file.seek(span.offset)
            found[name] = file.read(span.nbytes)
    return found


def test_a_source_that_alters_weights(joiner: Process, tools: type[Tools], model: Path) -> None:
    status = joiner.wait_ready()
    (liar,) = status["banned_peers"]
    assert (liar["name"], liar["banned_by"]) == ("liar", "this PC, as a source of models")
    assert "is not what the model's owner has there" in liar["reason"]
    log = (joiner.home.logs / "daemon.log").read_text(encoding="utf-8")
    assert f"peer {liar['peer']} is excluded as a source of models" in log
    (stored,) = (path for path in joiner.home.models.iterdir() if path.is_dir())
    assert tensors(stored) == tensors(model)
    client = tools.client(joiner.found().endpoints[0])
    answer = client.chat.completions.create(
        model="brought", messages=PROMPT, temperature=0, max_tokens=TOKENS
    )
    assert answer.choices[0].message.content == answered_by_transformers(model)
