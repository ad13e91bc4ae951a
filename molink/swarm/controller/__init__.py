"""The reconcilers that drive every deployment to its desired state, and their records."""
