"""Joining, discovery, the coordinator session and relayed routes."""
