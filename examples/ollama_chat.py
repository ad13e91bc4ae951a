"""One question by Ollama's client, with the rate of the answer.

pip install ollama
python ollama_chat.py "What is molink?" [--host http://127.0.0.1:5465] [--model NAME]
"""

import argparse
from collections.abc import Sequence

import ollama


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--host", default="http://127.0.0.1:5465")
    parser.add_argument("--model", default="", help="default: the first that is served")
    options = parser.parse_args(arguments)
    client = ollama.Client(host=options.host)
    try:
        model = options.model or client.list().models[0].model or ""
        question = {"role": "user", "content": options.question}
        for part in client.chat(model, [question], stream=True):
            print(part.message.content or "", end="", flush=True)
            if part.done and part.eval_count and part.eval_duration:
                rate = part.eval_count / part.eval_duration * 1e9
                print(f"\n({part.eval_count} tokens, {rate:.1f} tokens/s)")
    finally:
        client._client.close()


if __name__ == "__main__":
    main()
