"""The bundled toy chat model: its corpus, its training and its evaluation."""
