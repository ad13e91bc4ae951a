"""What an answer says beside its content: calls of tools, and what the model thinks first."""
