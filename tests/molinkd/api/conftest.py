"""A scripted backend, and endpoints over it."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from molinkd.api.app import create_app
from molinkd.api.endpoint_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from tests.support.direct_reader import DirectReader
from tests.support.fake_backend import FakeBackend, build_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def backend(model_folder: Path) -> FakeBackend:
    return FakeBackend(model_folder)


@asynccontextmanager
async def open_client(
    backend: FakeBackend, settings: ApiSettings | None = None
) -> AsyncIterator[TestClient]:
    server = TestServer(create_app(backend, settings or ApiSettings(), DirectReader()))
    async with TestClient(server) as client:
        yield client


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[TestClient]]:
    """``serve(backend, settings)``: a client of an endpoint with settings of its own."""
    return open_client


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[TestClient]:
    async with open_client(backend) as client:
        yield client


@pytest.fixture
def endpoint(backend: FakeBackend) -> Iterator[EndpointServer]:
    server = EndpointServer(backend, ApiSettings(), DirectReader())
    server.start(0)
    yield server
    server.stop()
