"""Tokens from logits: penalties, filters, noise that a stream takes with it."""
