"""Placement of layers on peers: rings, links, partition and allocation."""
