"""The local chat endpoint: OpenAI's routes, metrics and the chat page."""
