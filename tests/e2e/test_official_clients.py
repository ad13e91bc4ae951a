"""The clients ``openai``, ``ollama`` and ``anthropic`` against a swarm of three processes.

Those that need Node.js or much else, and tools, of which the bundled model knows nothing:
``test_clients.py``.
"""

import re
from collections.abc import Iterator

import anthropic
import httpx
import ollama
import openai
import pydantic
import pytest

from tests.support.processes import Process, Tools, owner_client

NAME = "molink-demo"
QUESTION = [{"role": "user", "content": "What is molink?"}]


class Sum(pydantic.BaseModel):
    # Else the toy adds properties without end.
    model_config = pydantic.ConfigDict(extra="forbid")

    text: str = pydantic.Field(max_length=20)
    total: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def answer(demo: Process) -> str:
    """The expected greedy answer of each client."""
    with Tools.client(demo.found().endpoints[0]) as client:
        whole = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0)
    text = whole.choices[0].message.content
    assert text
    return text


@pytest.fixture
def url(demo: Process) -> str:
    """The endpoint of another PC than the first."""
    return demo.found().endpoints[1]


@pytest.fixture
def of_ollama(url: str) -> Iterator[ollama.Client]:
    client = ollama.Client(host=url)
    yield client
    client._client.close()


def test_openai(url: str, answer: str) -> None:
    with Tools.client(url) as client:
        assert [one.id for one in client.models.list()] == [NAME]
        with client.chat.completions.stream(model=NAME, messages=QUESTION, temperature=0) as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            whole = stream.get_final_completion()
        assert "".join(pieces) == whole.choices[0].message.content == answer
        text = client.completions.create(model=NAME, prompt="molink is", max_tokens=8, echo=True)
        assert text.choices[0].text.startswith("molink is")
        asked = client.responses.create(model=NAME, input="What is molink?", temperature=0)
        assert (asked.output_text, asked.status) == (answer, "completed")
        with client.responses.stream(model=NAME, input="What is molink?", temperature=0) as events:
            pieces = [one.delta for one in events if one.type == "response.output_text.delta"]
            assert events.get_final_response().output_text == "".join(pieces) == answer
        formed = client.responses.parse(
            model=NAME, input="Two numbers", text_format=Sum, temperature=1.5
        )
        assert isinstance(formed.output_parsed, Sum)
        with pytest.raises(openai.BadRequestError, match="is not an embedding model"):
            client.embeddings.create(model=NAME, input="x")


def test_ollama(of_ollama: ollama.Client, answer: str) -> None:
    (listed,) = of_ollama.list().models
    assert listed.model == NAME
    assert listed.details is not None
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("5.25M", "BF16")
    assert of_ollama.pull(NAME).status == "success"
    assert (
        of_ollama.ps().models[0].context_length
        == of_ollama.show(NAME).modelinfo["qwen2.context_length"]
    )
    options = {"temperature": 0}
    whole = of_ollama.chat(NAME, QUESTION, options=options)
    assert (whole.message.content, whole.done_reason) == (answer, "stop")
    chunks = of_ollama.chat(NAME, QUESTION, options=options, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == answer
    assert of_ollama.generate(NAME, "What is molink?", options=options).response == answer
    formed = of_ollama.chat(NAME, QUESTION, format=Sum.model_json_schema())
    assert Sum.model_validate_json(formed.message.content or "")


def test_open_webui(url: str, answer: str) -> None:
    """The requests of Open WebUI 0.12.4: its tests of both kinds of connections, then its chats.

    Recorded from its routers, which passed against a swarm; its package is too large for CI.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate, br"}
    asked = {"model": NAME, "messages": QUESTION, "stream": False, "temperature": 0}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        verified = client.get("/v1/models")
        assert (verified.status_code, [one["id"] for one in verified.json()["data"]]) == (
            200,
            [NAME],
        )
        assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/api/version").json()["version"])
        for path in ("/api/tags", "/api/ps"):
            (model,) = client.get(path).json()["models"]
            assert (model["model"], model["name"]) == (NAME, NAME)
        chat = client.post("/v1/chat/completions", json=asked).json()
        assert chat["choices"][0]["message"]["content"] == answer
        options = {"options": {"temperature": 0}}
        assert client.post("/api/chat", json=asked | options).json()["message"]["content"] == answer


def test_lm_studio(url: str, answer: str) -> None:
    """LM Studio's REST API as documented: its own client libraries don't speak it."""
    asked = {"model": NAME, "messages": QUESTION, "max_tokens": -1, "temperature": 0}
    with httpx.Client(base_url=url, timeout=60) as client:
        (model,) = client.get("/api/v1/models").json()["models"]
        assert (model["key"], [one["id"] for one in model["loaded_instances"]]) == (NAME, [NAME])
        assert client.get(f"/api/v0/models/{NAME}").json()["state"] == "loaded"
        chat = client.post("/api/v0/chat/completions", json=asked).json()
        assert chat["choices"][0]["message"]["content"] == answer
        assert (chat["stats"]["stop_reason"], chat["stats"]["tokens_per_second"] > 0) == (
            "eosFound",
            True,
        )


def test_the_owners_token(demo: Process, of_ollama: ollama.Client) -> None:
    """From the endpoint's thread through the daemon to the coordinator."""
    with owner_client(demo.found().home) as owner:
        shown = owner.get("/swarm").json()
        assert shown["owner"]["pc"] in [one["pc"] for one in shown["pcs"]]
        assert [one["name"] for one in shown["owner"]["models"]] == [NAME]
        refused = owner.post("/swarm/stop", json={"model": "other"})
        assert (refused.status_code, "has no model other" in refused.text) == (404, True)
        served = owner.post("/swarm/serve", json={"model": NAME})
        assert served.json() == {"state": "asked", "done": 0, "total": 0, "name": NAME}
        assert "gpt-oss:20b" in owner.get("/swarm/models").text
    with pytest.raises(ollama.ResponseError, match="only the owner"):
        of_ollama.pull("qwen3:8b")


def test_anthropic(url: str, answer: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        with client.messages.stream(
            model=NAME, max_tokens=999, messages=QUESTION, extra_body={"temperature": 0}
        ) as stream:
            assert "".join(stream.text_stream) == answer
            message = stream.get_final_message()
        assert message.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model=NAME, messages=QUESTION)
        cached = message.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == message.usage.input_tokens + cached
