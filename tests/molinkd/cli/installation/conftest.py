"""A server with releases."""

from collections.abc import Iterator

import pytest

from tests.support.release_server import ReleaseServer, serve_release


@pytest.fixture
def server() -> Iterator[ReleaseServer]:
    with serve_release() as found:
        yield found
