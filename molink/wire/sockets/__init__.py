"""Authenticated ZeroMQ sockets: CURVE, the gatekeeper, client and server."""
