"""Attention over paged KV: backends and their choice."""
