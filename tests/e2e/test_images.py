"""Chats with images over processes on two PCs: three protocols, killed workers, bad images."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from molink.text.tokenizer import Tokenizer
from tests.support.models import MakeModel
from tests.support.processes import Tools
from tests.support.sight import (
    SeenPrompt,
    answer_reference,
    encode_picture,
    make_picture,
    make_seeing,
)

ANSWER, LONG_ANSWER = 24, 160
QUESTION, SECOND = "What do you see here?", "And here?"


def _reference_text(folder: Path, pictures: list[Any], count: int, eos: int | None) -> str:
    """The answer of transformers to two images, each followed by its question."""
    text = f"<|im_start|>user\n@{QUESTION}@{SECOND}<|im_end|>\n<|im_start|>assistant\n"
    prompt = SeenPrompt.from_text(folder, text, pictures)
    tokens = answer_reference(folder, prompt, count, eos)
    return Tokenizer.open(folder).decode([token for token in tokens if token != 258])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family", ["smolvlm", "mistral3", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
)
def test_images_over_processes(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel, family: str
) -> None:
    folder = make_seeing(make_model, tmp_path / "tiny", family)
    pictures = [make_picture(60, 40, 1), make_picture(30, 64, 2)]
    expected = _reference_text(folder, pictures, ANSWER, 258)
    long = _reference_text(folder, pictures, LONG_ANSWER, None)
    one, two = (encode_picture(picture) for picture in pictures)
    with tools.two_pcs(tmp_path / "pcs", folder, ("--coordinator-port", "0"), {}) as first:
        (endpoint,) = first.found().endpoints
        with httpx.Client(base_url=endpoint, timeout=60) as client:
            model = client.get("/v1/models").json()["data"][0]
            assert model["capabilities"] == {"vision": True}
            name = model["id"]
            shown = client.post("/api/show", json={"model": name}).json()
            assert "vision" in shown["capabilities"]
            for path, body, read in _asked(name, one, two):
                answer = client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                assert read(answer.json()) == expected, path
            _refuse_bad_images(client, name, one)
            path, body, read = next(_asked(name, one, two))
            usage = client.post(path, json=body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2
            for stage in (1, 0):
                status = first.wait_ready()
                peer = status["pipelines"][0]["stages"][stage]["peer"]
                (found,) = (each for each in status["peers"] if each["id"] == peer)
                lines: list[str] = []
                asked = {**body, "stream": True, "max_tokens": LONG_ANSWER, "ignore_eos": True}
                with client.stream("POST", path, json=asked) as stream:
                    for line in stream.iter_lines():
                        if line.startswith("data: {"):
                            if not lines:
                                psutil.Process(found["workers"][0]["pid"]).kill()
                            lines.append(line.removeprefix("data: "))
                parts = [json.loads(line)["choices"][0]["delta"] for line in lines]
                assert "".join(part.get("content") or "" for part in parts) == long, stage


def _asked(name: str, one: str, two: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    urls = [f"data:image/png;base64,{data}" for data in (one, two)]
    common = {"model": name, "temperature": 0}
    parts = [
        {"type": "image_url", "image_url": {"url": urls[0]}},
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": urls[1], "detail": "high"}},
        {"type": "text", "text": SECOND},
    ]
    yield (
        "/v1/chat/completions",
        {**common, "max_tokens": ANSWER, "messages": [{"role": "user", "content": parts}]},
        lambda answer: answer["choices"][0]["message"]["content"],
    )
    parts = [
        {"type": "input_image", "image_url": urls[0]},
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": urls[1], "detail": "auto"},
        {"type": "input_text", "text": SECOND},
    ]
    yield (
        "/v1/responses",
        {**common, "max_output_tokens": ANSWER, "input": [{"role": "user", "content": parts}]},
        lambda answer: answer["output"][0]["content"][0]["text"],
    )
    sources = [{"type": "base64", "media_type": "image/png", "data": data} for data in (one, two)]
    parts = [
        {"type": "image", "source": sources[0]},
        {"type": "text", "text": QUESTION},
        {"type": "image", "source": sources[1]},
        {"type": "text", "text": SECOND},
    ]
    yield (
        "/v1/messages",
        {**common, "max_tokens": ANSWER, "messages": [{"role": "user", "content": parts}]},
        lambda answer: answer["content"][0]["text"],
    )


def _refuse_bad_images(client: httpx.Client, name: str, one: str) -> None:
    for images in (["x"], [one[:200]], [one] * 200):
        body = {"model": name, "messages": [{"role": "user", "content": "x", "images": images}]}
        answer = client.post("/api/chat", json=body)
        assert answer.status_code == 400, answer.text
        assert "\n" not in answer.json()["error"]
