"""Speculative decoding: one pass through the ring verifies several proposed drafts."""
