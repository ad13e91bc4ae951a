"""The endpoint's backend: models served, requests and token streams."""
