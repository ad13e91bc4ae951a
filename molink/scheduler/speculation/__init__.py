"""Speculative decoding: tokens are guessed, and one pass through the ring verifies several."""
