"""An agent: the model calls functions of this script until it can answer.

    pip install openai
    python agent.py "Which of my disks is full?" [--url http://127.0.0.1:5465/v1] [--model NAME]

Serve a model that calls tools, such as qwen3:8b.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_ROUNDS = 8


def tell_time() -> str:
    """Return the local date and time."""
    return datetime.now().astimezone().isoformat(timespec="minutes")


def measure_disk(folder: str) -> str:
    """Return how full the disk of a folder is."""
    used = shutil.disk_usage(Path(folder))
    return f"{used.used / used.total:.0%} of {used.total / 1e9:.0f} GB"


#: What the model may call: a function, and a JSON schema of its arguments.
TOOLS: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "tell_time": (tell_time, {}),
    "measure_disk": (measure_disk, {"folder": {"type": "string", "enum": ["/", "."]}}),
}


def describe_tools() -> list[Any]:
    """Return the tools as the API takes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": function.__doc__,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                },
            },
        }
        for name, (function, properties) in TOOLS.items()
    ]


def call_tool(name: str, arguments: str) -> str:
    """Call a function; what is wrong goes to the model, which may try again."""
    try:
        function, _ = TOOLS[name]
        return function(**json.loads(arguments or "{}"))
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"error: {error!r}"


def run_agent(client: OpenAI, model: str, question: str, first_choice: Any = "auto") -> str:
    """Answer a question; ``first_choice`` is the ``tool_choice`` of the first round."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for number in range(MAX_ROUNDS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=describe_tools(),
            tool_choice=first_choice if number == 0 else "auto",
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = call_tool(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"no answer after {MAX_ROUNDS} rounds of calls"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the calls and the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:5465/v1")
    parser.add_argument("--model", default="", help="default: the first that is served")
    options = parser.parse_args(arguments)
    with OpenAI(base_url=options.url, api_key="unused") as client:
        model = options.model or client.models.list().data[0].id
        print(run_agent(client, model, options.question))


if __name__ == "__main__":
    main()
