"""Joining, discovery, sessions and relayed routes."""
