"""Fault injection: a swarm of real processes under load."""
