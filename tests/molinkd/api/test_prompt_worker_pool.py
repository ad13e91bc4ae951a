"""Worker processes tokenize prompts: fairly between clients, in time, and even if one is killed."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from molink.errors import BrokenModel, ContextTooLong, Overloaded, RequestError
from molink.text.tokenizer import Tokenizer
from molinkd.api import prompt_worker_pool
from molinkd.api.backend import ServedModel
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, ChatMessage, CompletionBody
from molinkd.api.prompt_worker_pool import PromptWorkers
from tests.support.fake_backend import build_model
from tests.support.inline_reader import InlineReader
from tests.support.net import until

#: Each of the text's words costs the pattern about four million steps; Oniguruma allows ten.
HOSTILE_PATTERN = "(a+)+b"
HOSTILE_TEXT = ("a" * 22 + "! ") * 1000


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model(tmp_path_factory.mktemp("hostile") / "model")
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": HOSTILE_PATTERN}, "behavior": "Isolated"}
    own = raw["pre_tokenizer"]
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split | {"invert": False}, own]}
    path.write_text(json.dumps(raw), encoding="utf-8")
    return folder


def offer_of(folder: Path, context: int = 65536) -> LoadedModel:
    return LoadedModel(ServedModel("tiny", folder, context, 0), Tokenizer.open(folder))


@pytest.fixture
def offer(model_folder: Path) -> LoadedModel:
    return offer_of(model_folder)


@pytest.fixture
async def reader() -> AsyncIterator[PromptWorkers]:
    reader = PromptWorkers({})
    yield reader
    await reader.close()
    assert not children()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_reader(child)]


def is_reader(process: psutil.Process) -> bool:
    try:
        return "molinkd.api.prompt_worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def chat(text: str) -> ChatBody:
    return ChatBody(messages=[ChatMessage(role="user", content=text)])


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(**fields)


async def test_workers_tokenize_like_this_process(
    reader: PromptWorkers, offer: LoadedModel
) -> None:
    direct = InlineReader()
    for body in (
        chat("naïve 🦊 hello"),
        chat("x " * 40_000),
        completion(prompt="hello"),
        completion(prompt=["hello", "world", [5, 6, 7]], echo=True),
    ):
        read = await reader.tokenize_prompts("", offer, body)
        assert read == await direct.tokenize_prompts("", offer, body)
    assert len(children()) == 2


async def test_errors_keep_their_type(
    reader: PromptWorkers, offer: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as refused:
        await reader.tokenize_prompts("", offer, completion(prompt=[10**6]))
    assert refused.value.param == "prompt"
    with pytest.raises(ContextTooLong) as long:
        await reader.tokenize_prompts("", offer_of(offer.model.folder, 8), chat("x" * 20_000))
    assert long.value.param == "messages"
    gone = LoadedModel(ServedModel("tiny", tmp_path, 512, 0), offer.tokenizer)
    with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
        await reader.tokenize_prompts("", gone, chat("x"))


async def test_a_slow_prompt_is_killed_and_the_next_is_read(
    reader: PromptWorkers,
    offer: LoadedModel,
    hostile_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = offer_of(hostile_folder)
    monkeypatch.setattr(prompt_worker_pool, "SHORT_S", 0.5)
    impatient = PromptWorkers({})
    try:
        with pytest.raises(RequestError, match=r"more than 0\.5 s"):
            await impatient.tokenize_prompts("", hostile, chat(HOSTILE_TEXT))
    finally:
        await impatient.close()
    # Another process has replaced the one that the hostile prompt kept busy.
    await reader.tokenize_prompts("", hostile, chat("hello"))
    assert await reader.tokenize_prompts("", offer, chat("hello"))


async def test_a_long_prompt_does_not_delay_short_ones(
    reader: PromptWorkers, offer: LoadedModel, hostile_folder: Path
) -> None:
    hostile = offer_of(hostile_folder)
    text = HOSTILE_TEXT * 2
    assert len(text) > prompt_worker_pool.SHORT_BODY_BYTES
    long = asyncio.create_task(reader.tokenize_prompts("", hostile, chat(text)))
    assert await reader.tokenize_prompts("", offer, chat("hello"))
    assert not long.done()
    await reader.close()
    with pytest.raises(asyncio.CancelledError):
        await long


async def test_a_killed_worker_is_restarted(reader: PromptWorkers, offer: LoadedModel) -> None:
    expected = await reader.tokenize_prompts("", offer, chat("hello"))
    for _ in range(2):
        for child in children():
            child.kill()
        assert await reader.tokenize_prompts("", offer, chat("hello")) == expected
    reads = [
        asyncio.create_task(reader.tokenize_prompts("", offer, chat("hello" * 1000)))
        for _ in range(8)
    ]
    await asyncio.sleep(0)
    for child in children():
        child.kill()
    assert len({len((await read).prompts[0].ids) for read in reads}) == 1


async def test_a_disconnected_client_is_skipped(reader: PromptWorkers, offer: LoadedModel) -> None:
    reads = [
        asyncio.create_task(reader.tokenize_prompts("", offer, chat("hello"))) for _ in range(6)
    ]
    await asyncio.sleep(0)
    for read in reads[::2]:
        read.cancel()
    for number, read in enumerate(reads):
        if number % 2:
            assert await read
        else:
            with pytest.raises(asyncio.CancelledError):
                await read


async def test_the_queue_is_bounded(
    offer: LoadedModel, reader: PromptWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_worker_pool, "MAX_SHORT", 2)
    narrow = PromptWorkers({})
    reads = [narrow.tokenize_prompts("", offer, chat("x")) for _ in range(5)]
    found = await asyncio.gather(*reads, return_exceptions=True)
    await narrow.close()
    # Two prompts are being tokenized, and two wait.
    assert [isinstance(read, Overloaded) for read in found] == [False] * 4 + [True]


async def test_one_client_cannot_starve_others(
    offer: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_worker_pool, "MAX_SHORT", 3)
    narrow = PromptWorkers({})
    # Two prompts are being tokenized, and three wait. The quiet client's prompt displaces the
    # greedy client's last one. The greedy client's next prompt is rejected until one of its others
    # ends.
    owners = ["greedy"] * 5 + ["quiet", "greedy"]
    reads = [
        asyncio.create_task(narrow.tokenize_prompts(owner, offer, chat("x"))) for owner in owners
    ]
    await asyncio.sleep(0)
    reads[2].cancel()
    await asyncio.sleep(0)
    reads.append(asyncio.create_task(narrow.tokenize_prompts("greedy", offer, chat("x"))))
    found = await asyncio.gather(*reads, return_exceptions=True)
    await narrow.close()
    refused = [isinstance(read, Overloaded) for read in found]
    assert refused == [False] * 4 + [True, False, True, False]
    assert isinstance(found[2], asyncio.CancelledError)


async def test_one_slow_text_delays_nobody(
    reader: PromptWorkers, offer: LoadedModel, hostile_folder: Path
) -> None:
    bad = asyncio.create_task(
        reader.tokenize_prompts("", offer_of(hostile_folder), chat(HOSTILE_TEXT[:20_000]))
    )
    assert await reader.tokenize_prompts("", offer, chat("hello"))
    assert not bad.done()
    with pytest.raises(RequestError, match="more than"):
        await bad


async def test_extra_workers_exit_when_idle(
    offer: LoadedModel, reader: PromptWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_worker_pool, "IDLE_TIMEOUT_S", 0.05)
    brief = PromptWorkers({})
    for _ in range(2):
        bodies = [chat("x"), chat("y"), chat("z " * 40_000)]
        await asyncio.gather(*(brief.tokenize_prompts("", offer, body) for body in bodies))
        await until(lambda: len(children()) == 1)
    await brief.close()


async def test_a_reloaded_tokenizer_is_reloaded_in_the_worker(
    reader: PromptWorkers, tmp_path: Path
) -> None:
    folder = build_model(tmp_path / "model")
    before = await reader.tokenize_prompts("", offer_of(folder), completion(prompt="hello"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"bos_token": "<|start|>", "add_bos_token": True}
    path.write_text(json.dumps(config), encoding="utf-8")
    after = await reader.tokenize_prompts("", offer_of(folder), completion(prompt="hello"))
    assert after.prompts[0].ids[1:] == before.prompts[0].ids


PARENT = """
import asyncio, sys
from pathlib import Path
from molink.text.tokenizer import Tokenizer
from molinkd.api.backend import ServedModel
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, ChatMessage
from molinkd.api.prompt_worker_pool import PromptWorkers

def chat(text):
    return ChatBody(messages=[ChatMessage(role="user", content=text)])

async def main():
    folder = Path(sys.argv[1])
    model = LoadedModel(ServedModel("tiny", folder, 65536, 0), Tokenizer.open(folder))
    workers = PromptWorkers({})
    await workers.tokenize_prompts("", model, chat("hi"))
    task = asyncio.create_task(workers.tokenize_prompts("", model, chat(sys.argv[2])))
    await asyncio.sleep(0)
    print("busy", flush=True)
    await task

asyncio.run(main())
"""


def test_a_worker_exits_with_the_daemon_even_while_busy(hostile_folder: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(hostile_folder), HOSTILE_TEXT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == b"busy"
        readers = psutil.Process(parent.pid).children(recursive=True)
        assert any(map(is_reader, readers))
        parent.kill()
    _, left = psutil.wait_procs(readers, timeout=30)
    assert not left
