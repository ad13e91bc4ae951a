"""Clients choose an adapter as a model; a ring gives the texts of merged weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from aiohttp.test_utils import TestClient

from molink.checkpoint.adapted_folder import adapt_model
from molink.text.tokenizer import Tokenizer
from molinkd.api.api_settings import ApiSettings
from molinkd.api.backend import ServedModel
from molinkd.api.http_server import EndpointServer
from tests.support.adapters import merge_adapter, write_adapter
from tests.support.fake_backend import FakeBackend
from tests.support.inline_reader import InlineReader
from tests.support.models import MakeModel
from tests.support.ring_backend import RingBackend
from tests.support.stage import Reference

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. "


@pytest.fixture
def adapted_backend(model_folder: Path) -> FakeBackend:
    """A model with two adapters, one of which is named like another model, and that other model."""
    backend = FakeBackend(model_folder, adapters=("poet", "other"))
    backend.others = [ServedModel("other", model_folder, 512, 1700000000)]
    return backend


@pytest.fixture
async def adapted_client(serve: Any, adapted_backend: FakeBackend) -> Any:
    async with serve(adapted_backend) as client:
        yield client


async def _chat(client: TestClient, model: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post("/v1/chat/completions", json=body)
    return answer.status, await answer.json()


async def test_adapters_are_listed_beside_their_model(adapted_client: TestClient) -> None:
    listed = (await (await adapted_client.get("/v1/models")).json())["data"]
    found = {model["id"]: model["parent"] for model in listed}
    assert found == {"tiny": None, "other": None, "poet": "tiny"}
    one = await (await adapted_client.get("/v1/models/poet")).json()
    assert (one["id"], one["parent"]) == ("poet", "tiny")
    tags = (await (await adapted_client.get("/api/tags")).json())["models"]
    assert [(one["name"], one["details"]["parent_model"]) for one in tags] == [
        ("tiny", ""),
        ("other", ""),
        ("poet", "tiny"),
    ]
    running = (await (await adapted_client.get("/api/ps")).json())["models"]
    assert [one["name"] for one in running] == ["tiny", "other", "poet"]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("tiny", ("tiny", "")), ("poet", ("tiny", "poet")), ("other", ("other", ""))],
)
async def test_the_model_of_a_request_is_its_adapter(
    adapted_client: TestClient, adapted_backend: FakeBackend, name: str, asked: tuple[str, str]
) -> None:
    status, answer = await _chat(adapted_client, name)
    assert (status, answer["model"]) == (200, name)
    assert [(one.model, one.adapter) for one in adapted_backend.requests] == [asked]


async def test_an_unknown_adapter_is_an_unknown_model(adapted_client: TestClient) -> None:
    status, answer = await _chat(adapted_client, "painter")
    assert status == 404
    assert answer["error"]["message"] == ("model 'painter' not found; available: tiny, other, poet")


async def test_one_model_needs_no_name_though_it_has_adapters(
    serve: Any, model_folder: Path
) -> None:
    backend = FakeBackend(model_folder, adapters=("poet",))
    async with serve(backend) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi"})
        assert (await answer.json())["model"] == "tiny"


@pytest.fixture(scope="module")
def trained(
    make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    """A model with two adapters, and the merged weights of each adapter by its name."""
    at = tmp_path_factory.mktemp("trained")
    base = make_model(at / "base", "qwen2", 3)
    adapters = {
        "poet": write_adapter(at / "poet", base, seed=1),
        "clerk": write_adapter(at / "clerk", base, ("k_proj", "up_proj"), 2, layers=(0, 2)),
    }
    merged = {n: merge_adapter(base, a, at / f"merged {n}", {"": 2.0}) for n, a in adapters.items()}
    return adapt_model("tiny", base, adapters, at / "into"), {"tiny": base, **merged}


@pytest.fixture(scope="module", params=[(1, 0), (2, 0), (2, 4)], ids=str)
def ring(
    trained: tuple[Path, dict[str, Path]], request: pytest.FixtureRequest
) -> Iterator[tuple[RingBackend, EndpointServer]]:
    """An endpoint over a ring of stages, with drafts or without."""
    torch.set_num_threads(1)
    parts, drafts = request.param
    backend = RingBackend(trained[0], parts=parts, num_speculative_tokens=drafts)
    server = EndpointServer(backend, ApiSettings(), InlineReader)
    server.start(0)
    yield backend, server
    server.stop()


def _expected(folder: Path, prompt: str, count: int) -> str:
    tokenizer = Tokenizer.open(folder)
    ids = Reference(folder).generate(tokenizer.encode(prompt), count)
    return tokenizer.decode(ids)


def test_answers_are_those_of_merged_weights(
    ring: tuple[RingBackend, EndpointServer], trained: tuple[Path, dict[str, Path]]
) -> None:
    backend, server = ring
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    assert {one.id for one in client.models.list()} == {"tiny", "poet", "clerk"}
    texts = {}
    for turn in range(2):
        for name in ("tiny", "poet", "clerk"):
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=32, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            texts.setdefault(name, []).append(answer.choices[0].text)
            assert answer.model == name
            cached = backend.tokens(str(len(backend.asked)))[0].cached_tokens
            assert (cached > 16) is (turn == 1), "only an answer of the same adapter is cached"
    client.close()
    assert len({texts[name][0] for name in texts}) == 3
    for name, folder in trained[1].items():
        assert texts[name] == [_expected(folder, PROMPT, 32)] * 2


def test_rows_of_several_adapters_in_one_batch(
    ring: tuple[RingBackend, EndpointServer], trained: tuple[Path, dict[str, Path]]
) -> None:
    from molink.wire.messages.data_plane import SamplingParams
    from molink.wire.messages.serving import Request

    backend, _ = ring
    keys = {}
    for number in range(6):
        name = ("tiny", "poet", "clerk")[number % 3]
        prompt = tuple(backend.tokenizer.encode(f"{number}. {PROMPT}"))
        adapter = "" if name == "tiny" else name
        request = Request("tiny", prompt, 32, SamplingParams(temperature=0.0), adapter=adapter)
        keys[backend.submit(request)] = name, prompt
    references = {name: Reference(folder) for name, folder in trained[1].items()}
    for key, (name, prompt) in keys.items():
        found = [token.token for token in backend.tokens(key)]
        assert found == references[name].generate(prompt, 32)
