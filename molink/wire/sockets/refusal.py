"""Whether anybody listens at an address: who is refused there knows that a process has ended.

libzmq tries again by itself and doesn't say why an attempt failed. A network that is down or that
loses everything refuses nothing, so a cut is told apart from an end.
"""

import asyncio
import socket
import time
from urllib.parse import urlsplit

#: Windows asks three times, half a second apart, before it believes a refusal.
_ATTEMPT_S = 2.5
#: A server that makes its socket anew listens again sooner than after so many seconds.
_LASTING_S = 0.3
_PAUSE_S = 0.1


async def is_refused(address: str) -> bool:
    """Whether ``address`` (``tcp://host:port``) refuses connections, and goes on doing so.

    It takes 0.3 s on most systems, 2 s on Windows, and as long until it is clear that it doesn't.
    """
    began = time.monotonic()
    while await _refused_once(address):
        if time.monotonic() - began >= _LASTING_S:
            return True
        await asyncio.sleep(_PAUSE_S)
    return False


async def _refused_once(address: str) -> bool:
    target = urlsplit(address)
    if target.hostname is None or target.port is None:
        return False
    loop = asyncio.get_running_loop()
    try:
        family = socket.AF_INET6 if ":" in target.hostname else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setblocking(False)
            async with asyncio.timeout(_ATTEMPT_S):
                await loop.sock_connect(tried, (target.hostname, target.port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    return False
