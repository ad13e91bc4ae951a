"""Routing of requests between several pipelines of a model."""
