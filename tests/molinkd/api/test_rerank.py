"""A real ring ranks documents as transformers' logits do; invalid requests are rejected."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient

from molink.checkpoint.model_task import ModelTask
from molink.text.tokenizer import Tokenizer
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.pooling.schema import MAX_INPUTS, RankedText, RerankBody
from molinkd.api.prompt_tokenization import tokenize_ranking
from tests.support.fake_backend import FakeBackend, build_model
from tests.support.models import write_model, write_modules
from tests.support.ring_backend import RingBackend
from tests.support.stage import Reference

DOCUMENTS = ["a fox", "something longer about a fox", "", "no fox"]
#: The template of a reranker for sentence-transformers: a system message is the instruction.
TEMPLATE = (
    "{%- set q = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first %}"
    "{%- set d = messages | selectattr('role', 'eq', \"document\") | map(attribute='content')"
    " | first %}"
    "{%- set s = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first"
    " | default('any') %}<|im_start|>{{ s }}: {{ q }} | {{ d }}<|im_end|>"
)
YES, NO = 88, 77
RELEVANT, IRRELEVANT = 5, 7

Serve = Callable[..., AbstractAsyncContextManager[TestClient]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = write_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", 3)
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    score = {"true_token_id": YES, "false_token_id": NO}
    return write_modules(made, ["Transformer", "LogitScore"], {"1_LogitScore": score})


@pytest.fixture(scope="module", params=[1, 2])
def ring(folder: Path, request: pytest.FixtureRequest) -> RingBackend:
    return RingBackend(folder, parts=request.param)


@pytest.fixture
def reranker(model_folder: Path) -> FakeBackend:
    return FakeBackend(model_folder, task=ModelTask("rerank", RELEVANT, IRRELEVANT))


@pytest.mark.parametrize("instruction", [None, "find a fox"])
async def test_scores_of_transformers(
    serve: Serve, ring: RingBackend, folder: Path, instruction: str | None
) -> None:
    reference, expected, tokens = Reference(folder), [], 0
    for document in DOCUMENTS:
        text = f"<|im_start|>{instruction or 'any'}: a fox? | {document}<|im_end|>"
        ids = ring.tokenizer.encode(text, special=False)
        logits = reference.logits(ids)[-1]
        expected.append(float((logits[YES] - logits[NO]).sigmoid()))
        tokens += len(ids)
    body = {"query": "a fox?", "documents": DOCUMENTS, "instruction": instruction}
    async with serve(ring) as client:
        found = await (await client.post("/v1/rerank", json=body)).json()
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert found["model"] == "tiny"
    order = [one["index"] for one in found["results"]]
    assert order == sorted(range(len(expected)), key=lambda index: -expected[index])
    for one in found["results"]:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-5)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}


async def test_the_best_without_their_texts(serve: Serve, reranker: FakeBackend) -> None:
    """The fake backend scores longer prompts lower."""
    documents = ["aaaa" * 9, {"text": "a"}, "aaaa"]
    async with serve(reranker) as client:
        body = {"query": "q", "documents": documents, "top_n": 2, "return_documents": False}
        found = (await (await client.post("/v2/rerank", json=body)).json())["results"]
        assert [one["index"] for one in found] == [1, 2]
        assert all(set(one) == {"index", "relevance_score"} for one in found)
        for count in (0, 100, None):
            body["top_n"] = count
            found = (await (await client.post("/rerank", json=body)).json())["results"]
            assert len(found) == len(documents)
    for request in reranker.requests:
        assert request.sampling_params.logprob_token_ids == (RELEVANT, IRRELEVANT)
        assert request.max_tokens == 1


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has "yes" and "no", with a template for conversations."""
    made = build_model(tmp_path_factory.mktemp("models") / "plain")
    path = made / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = raw["model"]["vocab"]
    for text in ("yes", "no"):
        vocabulary.setdefault(text, len(vocabulary))
    path.write_text(json.dumps(raw), encoding="utf-8")
    return made


async def test_a_reranker_known_by_its_name(serve: Serve, plain_folder: Path) -> None:
    """Qwen3-Reranker's first release lacked a template and sentence-transformers' files."""
    backend = FakeBackend(plain_folder, name="Qwen3-Reranker-0.6B")
    body = {"query": "what?", "documents": ["this"], "instruction": "do it"}
    async with serve(backend) as client:
        assert (await client.post("/v1/rerank", json=body)).status == 200
        backend.name = "qwen3-0.6b"
        response = await client.post("/v1/rerank", json=body)
        assert response.status == 400
        assert "`model`: qwen3-0.6b is not a reranker" in await response.text()
    (request,) = backend.requests
    tokenizer = backend.tokenizer
    known = tuple(tokenizer.find_token_id(text) for text in ("yes", "no"))
    assert request.sampling_params.logprob_token_ids == known
    text = tokenizer.decode(request.prompt_token_ids, skip_special=False)
    assert text == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: do it\n<Query>: what?\n<Document>: this<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_texts_are_not_formats(plain_folder: Path) -> None:
    backend = FakeBackend(plain_folder)
    loaded = LoadedModel(backend.list_models()[0], Tokenizer.open(plain_folder))
    body = RerankBody(query="{document}", documents=[RankedText("{query}{0}")])
    (prompt,) = tokenize_ranking(body, loaded)
    text = loaded.tokenizer.decode(prompt.ids, skip_special=False)
    assert "<Query>: {document}\n<Document>: {query}{0}<" in text
    assert "retrieve relevant passages" in text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", 5]}, "documents[1]"),
        ({"documents": [{"txt": "a"}]}, "documents[0].text"),
        ({"documents": [[1]]}, "documents[0]"),
        ({"documents": ["a"] * (MAX_INPUTS + 1)}, "documents"),
        ({"documents": ["a", "x" * 100_000]}, "documents[1]"),
        ({"documents": ["a", "x y " * 1000]}, "documents[1]"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": "all"}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"instruction": 5}, "instruction"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
async def test_bad_bodies(
    serve: Serve, reranker: FakeBackend, change: dict[str, Any], param: str
) -> None:
    async with serve(reranker) as client:
        body = {"query": "a", "documents": ["b"], **change}
        response = await client.post("/v1/rerank", json=body)
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), error
    assert reranker.requests == []


async def test_other_models_rank_nothing(
    serve: Serve, client: TestClient, reranker: FakeBackend
) -> None:
    body = {"query": "a", "documents": ["b"]}
    response = await client.post("/v1/rerank", json=body)
    assert response.status == 400
    assert "`model`: tiny is not a reranker" in await response.text()
    reranker.task = ModelTask("embed")
    reranker.name = "some-reranker"
    async with serve(reranker) as other:
        assert (await other.post("/v1/rerank", json=body)).status == 400


async def test_a_pipeline_without_scores(serve: Serve, reranker: FakeBackend) -> None:
    """PCs of another version report the likeliest tokens."""
    reranker.score = lambda request: ((5, -1.0), (8, -2.0))  # type: ignore[method-assign]
    async with serve(reranker) as client:
        response = await client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
        assert response.status == 500
        assert "another version" in await response.text()


@pytest.fixture(autouse=True)
def all_closed(reranker: FakeBackend) -> Iterator[None]:
    yield
    assert reranker.running == 0
