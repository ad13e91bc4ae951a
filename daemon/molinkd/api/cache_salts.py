"""Salts that keep the prefix cache of one client from another.

Usage counts and response times tell how much of a prompt was cached, to the token, so clients that
share a prefix cache can test guesses of each other's prompts. Clients with different API keys
therefore have different salts, which key the scheduler's prefix tree and the digests of prefix
reports.

A salt is a digest under a random secret of this endpoint. Other PCs learn neither the key nor its
name from it, not even by trying likely ones, and keys of two PCs never share a cache, although
their texts may be the same. The secret lasts as long as the endpoint; after a restart, prompts are
computed again. An endpoint without keys has one user, the PC's, whom the other PCs trust like
itself: its salt is empty and its prompts are shared with all PCs without keys.
"""

import secrets
from hashlib import blake2b

import msgspec
from aiohttp import web

from molink.wire.messages.serving import MAX_CACHE_SALT
from molinkd.api.access_guard import key_name


class CacheSalts:
    """Derives the salts of an endpoint's requests; all keys share one if ``is_shared``."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._secret = secrets.token_bytes(32)

    def derive_salt(self, request: web.BaseRequest, requested: str | None) -> bytes:
        """The salt of a request, at most :data:`MAX_CACHE_SALT` bytes; empty to share with all.

        ``requested`` is the body's ``cache_salt``, which narrows the sharing further.
        """
        name = None if self._is_shared else key_name(request)
        if name is None and requested is None:
            return b""
        scope = msgspec.json.encode((name, requested))
        return blake2b(scope, digest_size=MAX_CACHE_SALT, key=self._secret).digest()
