"""Peer ids."""

import hashlib


def derive_peer_id(public_key: str) -> str:
    """Derive a peer's id from its public key: 16 hexadecimal digits."""
    return hashlib.blake2b(public_key.encode("ascii"), digest_size=8).hexdigest()
