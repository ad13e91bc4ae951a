"""Placement: which peer runs which layers; rings, links, partition and allocation."""
