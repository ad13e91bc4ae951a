"""The control plane: membership, invitations, placement and the coordinator process."""
