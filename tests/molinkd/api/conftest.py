"""A scripted backend and endpoints that serve it."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from molinkd.api.administration import Administration
from molinkd.api.api_settings import ApiSettings
from molinkd.api.app import create_app
from molinkd.api.http_server import EndpointServer
from tests.molinkd.cli.top import swarms
from tests.support.fake_administration import TOKEN, FakeAdministration
from tests.support.fake_backend import FakeBackend, build_model
from tests.support.inline_reader import InlineReader
from tools.browser import Browser, find_driver


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def backend(model_folder: Path) -> FakeBackend:
    return FakeBackend(model_folder)


@asynccontextmanager
async def open_client(
    backend: FakeBackend,
    settings: ApiSettings | None = None,
    administration: Administration | None = None,
) -> AsyncIterator[TestClient]:
    owner = administration or FakeAdministration()
    app = create_app(backend, settings or ApiSettings(), InlineReader(), owner)
    server = TestServer(app)
    async with TestClient(server) as client:
        yield client


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[TestClient]]:
    """``serve(backend, settings)``: a client of a new endpoint."""
    return open_client


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[TestClient]:
    async with open_client(backend) as client:
        yield client


@pytest.fixture
def endpoint(backend: FakeBackend) -> Iterator[EndpointServer]:
    server = EndpointServer(backend, ApiSettings(), InlineReader)
    server.start(0)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    """One Chromium for all tests."""
    driver = find_driver()
    assert driver is not None
    browser = Browser(driver, 1200, 800)
    yield browser
    browser.close()


@pytest.fixture
def administration() -> FakeAdministration:
    return FakeAdministration()


@pytest.fixture
def page(
    backend: FakeBackend, administration: FakeAdministration, window: Browser
) -> Iterator[Callable[..., Browser]]:
    """``page(**settings)`` opens the page of a new endpoint, with its own storage.

    ``at`` is the address's fragment.

    Fails on violations of the content security policy and on script errors.
    """
    backend.context = 8000
    backend.swarm = swarms.ring(["attic", "<img src=x onerror=window.hit=1>"], model="tiny")
    servers = []

    def open_page(served: FakeBackend = backend, at: str = "", **settings: Any) -> Browser:
        made = ApiSettings(owner_token=TOKEN, **settings)
        server = EndpointServer(served, made, InlineReader, lambda: administration)
        server.start(0)
        servers.append(server)
        window.open(server.url.removesuffix("/v1") + "/" + at)
        return window

    window.emulate("Emulation.clearDeviceMetricsOverride")
    yield open_page
    complaints = [one for one in window.complaints() if "Failed to load resource" not in one]
    window.open("about:blank")
    for server in servers:
        server.stop()
    assert complaints == []
