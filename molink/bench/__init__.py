"""Load for any OpenAI-style endpoint, and what it measures there."""
