"""Transmission from one stage to the next.

Policies and their credits, numbered messages that come exactly once, volumes in pieces, estimates
of the link, lossless packing, heartbeats, and recordings of what was decided.
"""
