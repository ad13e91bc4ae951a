"""``molink top``: the swarm on one screen, as it is now."""
