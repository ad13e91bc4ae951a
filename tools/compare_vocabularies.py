"""Vocabularies of GGUF files here and in llama.cpp, by the texts that come with llama.cpp.

    python -m tools.compare_vocabularies llama.cpp/models

In that folder ``NAME.gguf`` is a vocabulary, ``NAME.gguf.inp`` has texts and ``NAME.gguf.out`` the
tokens of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer

from molink.errors import ModelError
from molink.gguf.header import read_gguf
from molink.gguf.tokenizer_files import build_tokenizer_files

_BETWEEN = "\n__ggml_vocab_test__\n"


def compare(path: Path) -> str:
    """How many texts have the same tokens, or why it isn't read."""
    texts, wanted = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    try:
        metadata = read_gguf(path).metadata
        count = len(metadata.get_strings("tokenizer.ggml.tokens"))
        tokenizer = Tokenizer.from_str(build_tokenizer_files(metadata, count).tokenizer)
    except ModelError as error:
        return f"not read: {str(error)[:120]}"
    if not texts.exists():
        return "read; there are no texts"
    given = texts.read_text(encoding="utf-8").split(_BETWEEN)[:-1]  # each has one behind it
    lines = wanted.read_text(encoding="utf-8").splitlines()
    same = [
        tokenizer.encode(text, add_special_tokens=False).ids == [int(one) for one in line.split()]
        for text, line in zip(given, lines, strict=True)
    ]
    return f"{sum(same)} of {len(same)} texts have the same tokens"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for path in sorted(parser.parse_args().folder.glob("ggml-vocab-*.gguf")):
        print(f"{path.stem:32} {compare(path)}", flush=True)


if __name__ == "__main__":
    main()
