"""Authenticated ZeroMQ sockets: CURVE, ZAP, client and server."""
