"""The scripts of ``examples`` against three PCs with the bundled model."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients import python_program
from tests.support.examples import FOLDER, load_script
from tests.support.processes import Process

QUESTION = "What is molink?"


@pytest.fixture
def root(demo: Process) -> str:
    return demo.found().endpoints[1]


def test_a_conversation(
    root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\nHow do I add a PC?\n"))
    load_script("chat").main(["--url", f"{root}/v1"])
    first, second = capsys.readouterr().out.strip().splitlines()
    assert "molink" in first
    assert second


def test_ollamas_client(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    load_script("ollama_chat").main([QUESTION, "--host", root])
    answer, rate = capsys.readouterr().out.strip().splitlines()
    assert "molink" in answer
    assert rate.endswith(" tokens/s)")


def test_json(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("extract_json")
    script.main(["Invoice 17, 3 cables at 4.50 each", "--url", f"{root}/v1"])
    assert script.Invoice.model_validate_json(capsys.readouterr().out)


def answer_batch(root: str, folder: Path, prompts: int) -> list[int]:
    """Answer ``prompts`` prompts in two runs; returns their numbers in the file's order."""
    source, target = folder / "prompts.txt", folder / "answers.jsonl"
    lines = [f"What is {number} plus 1?" for number in range(prompts)]
    options = [str(source), str(target), "--url", f"{root}/v1", "--max-tokens", "3"]
    for there in (prompts // 4, prompts):
        source.write_text("\n".join(lines[:there]), encoding="utf-8")
        load_script("batch").main(options)
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert all(one["text"] for one in found)
    return [one["prompt"] for one in found]


def test_a_batch(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(answer_batch(root, tmp_path, 20)) == list(range(20))
    assert capsys.readouterr().out.splitlines()[-1] == "15 of 20 prompts to answer"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_batch_of_1000_prompts(root: str, tmp_path: Path) -> None:
    assert sorted(answer_batch(root, tmp_path, 1000)) == list(range(1000))


@pytest.mark.slow
def test_langchain(root: str) -> None:
    command = [python_program("python"), str(FOLDER / "langchain_chat.py"), "a spare PC"]
    done = subprocess.run(
        [*command, "--url", f"{root}/v1"], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip()
