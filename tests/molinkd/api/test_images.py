"""Images in all protocols: decoded for a multimodal model, rejected for other models."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from molink.facts.images import FIRST_IMAGE_ID, MAX_IMAGES
from molinkd.api.api_settings import ApiSettings
from tests.support.fake_backend import FakeBackend
from tests.support.models import MakeModel
from tests.support.sight import encode_picture, make_picture, make_seeing

PICTURE = encode_picture(make_picture(20, 30))
URL = f"data:image/png;base64,{PICTURE}"


@pytest.fixture(scope="module")
def seeing(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small multimodal model."""
    return make_seeing(make_model, tmp_path_factory.mktemp("seeing") / "model", "mistral3")


@pytest.fixture
def eyes(seeing: Path) -> FakeBackend:
    """A backend that serves the multimodal model."""
    return FakeBackend(seeing, sees_images=True)


def chat(*urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}]}


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(URL)),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL},
                        {"type": "input_text", "text": "What is it?"},
                    ],
                }
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": PICTURE,
                            },
                        },
                        {"type": "text", "text": "What is it?"},
                    ],
                }
            ],
        },
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "What is it?", "images": [PICTURE]}]},
    ),
    ("/api/generate", {"prompt": "What is it?", "images": [PICTURE]}),
]


@pytest.mark.parametrize(("path", "body"), FORMS, ids=[path for path, _ in FORMS])
async def test_an_image_in_every_protocol(
    serve: Any, eyes: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    client: TestClient
    async with serve(eyes) as client:
        response = await client.post(path, json={"model": "tiny", "stream": False, **body})
        assert response.status == 200, await response.text()
    (request,) = eyes.requests
    (image,) = request.images
    ids = request.prompt_token_ids
    # Two lines of two cells each, with a token between them.
    assert (image.span.height, image.span.width, image.span.line) == (32, 32, 2)
    seen = [position for position, token in enumerate(ids) if token >= FIRST_IMAGE_ID]
    first = image.span.start
    assert seen == [first, first + 1, first + 3, first + 4]
    assert [ids[position] for position in seen] == image.row_ids


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (chat("https://example.org/a.png"), "messages[0].content[0].image_url", "fetches nothing"),
        (chat(URL, URL[:62]), "messages[0].content[1].image_url", "not a readable image"),
        (chat(*[URL] * (MAX_IMAGES + 1)), "messages", f"at most {MAX_IMAGES} images"),
        (
            {
                "messages": [
                    *chat(URL)["messages"],
                    {"role": "user", "content": "[IMG] is a token"},
                ]
            },
            "messages",
            "shows 2 images",
        ),
    ],
    ids=["a URL", "a damaged image", "too many", "a placeholder in a text"],
)
async def test_bad_images_are_refused(
    serve: Any, eyes: FakeBackend, body: dict[str, Any], field: str, message: str
) -> None:
    client: TestClient
    async with serve(eyes) as client:
        response = await client.post("/v1/chat/completions", json={"model": "tiny", **body})
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["param"] == field
        assert message in error["message"]
        assert "\n" not in error["message"]
        fine = await client.post("/v1/chat/completions", json={"model": "tiny", **chat(URL)})
        assert fine.status == 200


async def test_what_a_model_can_is_told(
    serve: Any, eyes: FakeBackend, backend: FakeBackend
) -> None:
    for served, sees in ((eyes, True), (backend, False)):
        client: TestClient
        async with serve(served) as client:
            (model,) = (await (await client.get("/v1/models")).json())["data"]
            assert model["capabilities"] == {"vision": sees}
            shown = await (await client.post("/api/show", json={"model": "tiny"})).json()
            assert ("vision" in shown["capabilities"]) is sees
            props = await (await client.get("/props")).json()
            assert props["modalities"]["vision"] is sees


async def test_bodies_with_images_may_be_larger(
    serve: Any, eyes: FakeBackend, backend: FakeBackend
) -> None:
    settings = ApiSettings(max_body_bytes=1024, max_image_body_bytes=64 * 1024)
    large = chat(f"data:;base64,{encode_picture(make_picture(90, 90))}")
    for served, status in ((eyes, 200), (backend, 413)):
        client: TestClient
        async with serve(served, settings) as client:
            response = await client.post("/v1/chat/completions", json={"model": "tiny", **large})
            assert response.status == status, await response.text()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_image_bytes": 2 * 64 * 64 * 3 - 1},
        # Until it has arrived, a body counts as if it had the maximum size.
        {"max_image_bytes": 50_000, "max_body_bytes": 1024, "max_image_body_bytes": 40_000},
    ],
    ids=["pixels", "bodies"],
)
async def test_images_of_running_requests_are_bounded(
    serve: Any, eyes: FakeBackend, limits: dict[str, int]
) -> None:
    body = {"model": "tiny", "max_tokens": 1}
    body |= chat(f"data:;base64,{encode_picture(make_picture(90, 90))}")
    eyes.gate = gate = asyncio.Semaphore(0)
    client: TestClient
    async with asyncio.timeout(30), serve(eyes, ApiSettings(**limits)) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await eyes.until_running(1)
        refused = await client.post("/v1/chat/completions", json=body)
        assert "memory for images" in await refused.text()
        assert refused.status == 429
        eyes.gate = None
        gate.release()
        assert (await first).status == 200
        again = await client.post("/v1/chat/completions", json=body)
        assert again.status == 200, await again.text()
