"""A client's request as the daemon that received it owns it."""
