"""The control plane, sans-IO: membership, placement, formation, and a daemon's decisions."""
