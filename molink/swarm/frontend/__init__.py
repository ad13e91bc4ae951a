"""A client's request, as managed by the daemon that received it."""
