"""`molink up --adapter`, as people type it: two PCs, the official client, and bad input."""

from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from molink.text.tokenizer import Tokenizer
from tests.support.adapters import merge_adapter, write_adapter
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools, local_options, run_molink
from tests.support.stage import Reference

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. "


def _refused(home: Path, model: Path, *options: str) -> str:
    ended = run_molink(
        home, "up", *local_options(), "--coordinator-port", "0", "--model", str(model), *options
    )
    assert ended.returncode != 0
    (line,) = [one for one in ended.stderr.splitlines() if one.startswith("error:")]
    return line


def test_adapters_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path: Path, make_model: MakeModel
) -> None:
    model = make_model(tmp_path / "tiny")
    other = make_model(tmp_path / "other", "qwen2", 1, hidden_size=48)
    foreign = write_adapter(tmp_path / "foreign", other)
    line = _refused(tmp_path / "home", model, "--adapter", f"poet={foreign}")
    assert "the adapter is of another model" in line
    good = write_adapter(tmp_path / "good", model, ("q_proj",))
    line = _refused(tmp_path / "home", model, "--adapter", f"tiny={good}")
    assert "an adapter can't be called tiny, which is the model's name" in line
    line = _refused(tmp_path / "home", model, "--adapter", str(good))
    assert "`adapters` is NAME=FOLDER" in line


def test_saved_adapters_belong_to_the_model_that_was_named_with_them(
    tmp_path: Path, make_model: MakeModel
) -> None:
    home, model = tmp_path / "home", make_model(tmp_path / "tiny")
    adapter = write_adapter(tmp_path / "adapter", model, ("q_proj",))
    up = ["up", "--background", "--stage", "none", *local_options("--coordinator-port", "0")]

    def start(*options: str) -> str:
        started = run_molink(home, *up, *options)
        try:
            return started.stdout + started.stderr
        finally:
            run_molink(home, "down")

    assert "Serving tiny with poet from" in start(
        "--model", str(model), f"--adapter=poet={adapter}"
    )
    assert "Serving tiny with poet from" in start()
    moved = adapter.rename(tmp_path / "moved")
    refusal = start()
    assert (
        f"error: adapter poet: {adapter} is not a folder (--adapters is a saved option" in refusal
    )
    assert "config unset adapters" in refusal
    assert "Serving tiny with ode from" in start(f"--adapter=ode={moved}")
    assert "Serving tiny from" in start("--model", str(model))
    assert "Serving tiny from" in start()


def _complete(client: openai.OpenAI, model: str) -> Any:
    return client.completions.create(
        model=model, prompt=PROMPT, max_tokens=32, temperature=0, extra_body={"ignore_eos": True}
    )


def _lists(client: openai.OpenAI, names: set[str]) -> bool:
    """Whether an endpoint offers exactly these models."""
    return {one.id for one in client.models.list()} == names


def _expected(folder: Path) -> str:
    tokenizer = Tokenizer.open(folder)
    return tokenizer.decode(Reference(folder).generate(tokenizer.encode(PROMPT), 32))


class _TwoPCs:
    """A PC that serves a model with adapters, and one that has joined it."""

    def __init__(self, root: Path, tools: type[Tools], options: list[str]) -> None:
        self._root, self._tools = root, tools
        self._common = local_options("--coordinator-port", "0")
        self.first = self._start_first(options)
        tools.wait_for(lambda: self.first.home.membership.exists(), self.first)
        token = run_molink(root / "first", "invite").stdout.strip()
        self.second = tools.Process(root / "second", ["join", token, *self._common])

    def _start_first(self, options: list[str]) -> Process:
        up = ["up", "--dtype", "f32", "--min-peers", "2", *options, *self._common]
        return self._tools.Process(self._root / "first", up)

    def restart_first(self, options: list[str]) -> None:
        """Serve the last model with other adapters."""
        self.first.stop()
        self.first = self._start_first(options)

    def stop(self) -> None:
        for process in (self.second, self.first):
            process.stop()

    def check_answers(self, folders: dict[str, Path]) -> None:
        """Both endpoints answer for each name as transformers does for its folder."""
        expected = {name: _expected(folder) for name, folder in folders.items()}
        assert len({*expected.values()}) == len(expected)
        for process in (self.first, self.second):
            process.wait_ready()
            client = self._tools.client(process.found().endpoints[0])
            self._tools.wait_for(partial(_lists, client, {*folders}), process)
            for name in (*folders, *folders):
                answer = _complete(client, name)
                assert (answer.model, answer.choices[0].text) == (name, expected[name])

    def count_stages(self) -> int:
        """Stages of the pipeline."""
        return sum(len(one["stages"]) for one in self.first.status()["pipelines"] if one["ready"])


@pytest.mark.slow
def test_two_pcs_answer_for_a_model_and_its_adapters(
    tmp_path: Path, make_model: MakeModel, tools: type[Tools]
) -> None:
    model = make_model(tmp_path / "tiny", "qwen2", 3, num_hidden_layers=4)
    adapters = {
        "poet": write_adapter(tmp_path / "poet", model, seed=1),
        "clerk": write_adapter(tmp_path / "clerk", model, ("q_proj", "down_proj"), 2, layers=(3,)),
    }
    folders = {"tiny": model}
    for name, adapter in adapters.items():
        folders[name] = merge_adapter(model, adapter, tmp_path / f"merged {name}", {"": 2.0})
    options = [f"--adapter={name}={folder}" for name, folder in adapters.items()]
    pcs = _TwoPCs(tmp_path, tools, ["--model", str(model), *options])
    try:
        pcs.check_answers(folders)
        assert pcs.count_stages() == 2
        client = tools.client(pcs.second.found().endpoints[0])
        assert {one.id: one.parent for one in client.models.list()} == {
            "tiny": None, "poet": "tiny", "clerk": "tiny",
        }  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="model 'painter' not found"):
            _complete(client, "painter")
        # Other adapters are another model for the swarm, which both PCs serve after a restart.
        write_adapter(tmp_path / "poet", model, seed=9)
        folders["poet"] = merge_adapter(model, adapters["poet"], tmp_path / "again", {"": 2.0})
        folders["scribe"] = folders.pop("clerk")
        pcs.restart_first(
            [f"--adapter=poet={adapters['poet']}", f"--adapter=scribe={adapters['clerk']}"]
        )
        pcs.check_answers(folders)
    finally:
        pcs.stop()


@pytest.mark.slow
def test_adapters_of_a_swarm_file_are_served_after_a_restart(
    tmp_path: Path, make_model: MakeModel, tools: type[Tools]
) -> None:
    model = make_model(tmp_path / "tiny", "qwen2", 3)
    adapter = write_adapter(tmp_path / "adapters" / "poet", model)
    file = tmp_path / "swarm.toml"
    file.write_text(
        '[[models]]\nmodel = "tiny"\ndtype = "f32"\nadapters = { poet = "adapters/poet" }\n',
        encoding="utf-8",
    )
    merged = merge_adapter(model, adapter, tmp_path / "merged", {"": 2.0})
    common = ["up", "--dtype", "f32", *local_options("--coordinator-port", "0")]
    process = tools.Process(tmp_path / "home", [*common, "--model", str(model)])
    try:
        process.wait_ready()
        client = tools.client(process.found().endpoints[0])
        assert _lists(client, {"tiny"})
        applied = run_molink(tmp_path / "home", "apply", str(file))
        assert applied.returncode == 0, applied.stderr
        tools.wait_for(partial(_lists, client, {"tiny", "poet"}), process)
        assert _complete(client, "poet").choices[0].text == _expected(merged)
        process.stop()
        process = tools.Process(tmp_path / "home", common)
        process.wait_ready()
        client = tools.client(process.found().endpoints[0])
        tools.wait_for(partial(_lists, client, {"tiny", "poet"}), process)
        assert _complete(client, "poet").choices[0].text == _expected(merged)
        assert _complete(client, "tiny").choices[0].text == _expected(model)
    finally:
        process.stop()
