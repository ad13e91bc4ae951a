"""Decides who may join: pairing, invitations, tokens, versions and banned peers."""
