"""Speculative decoding: drafts are proposed, and one pass through the ring verifies several."""
