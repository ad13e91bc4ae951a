"""A conversation by OpenAI's client: each line is a question, and earlier ones are remembered.

pip install openai
python chat.py [--url http://127.0.0.1:5465/v1] [--model NAME]
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from openai import OpenAI


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer the lines of the standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:5465/v1")
    parser.add_argument("--model", default="", help="default: the first that is served")
    parser.add_argument("--api-key", default="unused")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key=options.api_key) as client:
        model = options.model or client.models.list().data[0].id
        messages: list[Any] = []
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            text = ""
            stream = client.chat.completions.create(model=model, messages=messages, stream=True)
            for chunk in stream:
                piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
                print(piece, end="", flush=True)
                text += piece
            print()
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
