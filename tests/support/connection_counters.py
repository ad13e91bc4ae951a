"""Whether this system reports the bytes received on a connection: Windows since 10 1703."""

import sys

import pytest

if sys.platform == "win32":
    COUNTS = sys.getwindowsversion()[:3] >= (10, 0, 15063)
else:
    COUNTS = True

counted = pytest.mark.skipif(not COUNTS, reason="Windows counts no bytes before 10 1703")
