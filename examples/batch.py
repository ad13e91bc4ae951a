"""Answer a file of prompts, one a line, into a JSON Lines file. A second run continues the first.

    pip install openai
    python batch.py prompts.txt answers.jsonl [--url http://127.0.0.1:5465/v1] [--at-once 32]

Lower priority than other requests of the same key: the batch takes what they leave.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from openai import OpenAI


def read_done(path: Path) -> set[int]:
    """Return the numbers of the prompts that have an answer; a line that was cut off has none."""
    done = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            done.add(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError):
            continue
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer what has no answer yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:5465/v1")
    parser.add_argument("--model", default="", help="default: the first that is served")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args(arguments)
    prompts = options.prompts.read_text(encoding="utf-8").splitlines()
    done = read_done(options.answers)
    waiting = [number for number in range(len(prompts)) if number not in done]
    print(f"{len(waiting)} of {len(prompts)} prompts to answer")
    # The client waits and asks again when the queue is full (429).
    with (
        OpenAI(base_url=options.url, api_key="unused", max_retries=20) as client,
        options.answers.open("a", encoding="utf-8") as file,
        ThreadPoolExecutor(options.at_once) as pool,
    ):
        model = options.model or client.models.list().data[0].id

        def ask(number: int) -> dict[str, object]:
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompts[number]}],
                max_tokens=options.max_tokens,
                extra_body={"priority": 10},
            )
            return {"prompt": number, "text": answer.choices[0].message.content}

        for finished in as_completed([pool.submit(ask, number) for number in waiting]):
            file.write(json.dumps(finished.result()) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
