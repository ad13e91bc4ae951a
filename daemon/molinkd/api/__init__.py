"""The chat endpoint of a PC: OpenAI, Anthropic and Ollama routes, metrics and the chat page."""
