"""Discrete-event simulation of molink's real schedulers, links and rings in virtual time."""
