"""The API's backend: served models, requests and token streams."""
