"""Control plane: reconcilers that drive each deployment to its desired state, and their records."""
