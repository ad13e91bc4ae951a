"""Which of several pipelines of a model serves a request."""
