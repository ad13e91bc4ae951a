"""Valid and invalid requests by ``/openapi.json`` are answered promptly and below 500."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from molinkd.api.api_settings import ApiSettings
from molinkd.api.http_server import EndpointServer
from molinkd.api.prompt_worker_pool import PromptWorkers
from tests.support.clients import python_program
from tests.support.tool_answers import CALL, backend_of
from tests.support.tool_templates import HERMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: A `POST` without JSON gets a 415 before routing, so methods are not checked.
CHECKS = "not_a_server_error,content_type_conformance,status_code_conformance"
#: Time limit; most of it is spent generating bodies.
SECONDS = "150"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """An endpoint whose model accepts tools and calls one."""
    backend = backend_of(tmp_path / "tiny", HERMES, f"ok<tool_call>{CALL}</tool_call>")
    server = EndpointServer(backend, ApiSettings(), lambda: PromptWorkers({}))
    server.start(0)
    yield f"http://127.0.0.1:{server.port}"
    server.stop()
    assert backend.running == 0


def test_all_routes(url: str, tmp_path: Path) -> None:
    command = [python_program("schemathesis"), "run", f"{url}/openapi.json", "--checks", CHECKS]
    command += ["--max-examples", "30", "--max-time", SECONDS, "--seed", "1", "--no-shrink"]
    command += ["--phases", "coverage,fuzzing", "--request-timeout", "60", "--no-color"]
    done = subprocess.run(
        [*command, "--continue-on-failure"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    print(done.stdout[-2000:])
