"""Processes, event loops, supervision, HTTP and the command line, on top of ``molink``."""
