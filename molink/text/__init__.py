"""Tokenizers, chat templates, detokenizers, grammars and answer parsers."""
