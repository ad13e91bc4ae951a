import subprocess
import sys
from typing import Any

import pytest

from molinkd.platform import raise_descriptor_limit

SCRIPT = """
import resource
from molinkd.platform import raise_descriptor_limit
hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_descriptors_up_to_the_hard_limit() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_second_call_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    raise_descriptor_limit()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    changes: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: changes.append(given))
    raise_descriptor_limit()
    assert changes == []
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised
