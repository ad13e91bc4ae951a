"""The control plane: reconcilers that drive deployments to their desired state, and records."""
