"""``molink top``: a live view of the swarm."""
