"""Attention over paged keys and values: a protocol, its backends, and their choice."""
