"""``/v1/chat/completions``, ``/v1/completions`` and the other routes of OpenAI's API."""
