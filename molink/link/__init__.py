"""Transmission from one stage to the next.

Policies and credit windows, numbered messages with exactly-once delivery, volume fragments, link
estimates, packing, heartbeats, and recordings of policy decisions.
"""
