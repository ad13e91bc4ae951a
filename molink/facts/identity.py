"""Peer ids."""

import hashlib


def derive_peer_id(public_key: str) -> str:
    """A peer's id: 16 hexadecimal digits derived from its public key."""
    return hashlib.blake2b(public_key.encode("ascii"), digest_size=8).hexdigest()
