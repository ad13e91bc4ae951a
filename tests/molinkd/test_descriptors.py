import subprocess
import sys

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


def test_again_changes_nothing() -> None:
    raise_descriptor_limit()
    raise_descriptor_limit()
