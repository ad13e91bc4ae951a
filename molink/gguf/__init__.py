"""GGUF files, as llama.cpp writes them: read with care, and laid out as a model folder."""
