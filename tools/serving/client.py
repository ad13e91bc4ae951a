"""Stream completions from an OpenAI-style server and time every piece."""

import json
import random
import string
import time

import aiohttp

from molink.bench.report import Sample

_LETTERS = string.ascii_lowercase.replace("h", "")  # "th" is one token of the bench model


def make_prompt(tokens: int, seed: int) -> str:
    """Text of about ``tokens`` tokens; a letter is a token of the bench model."""
    return "".join(random.Random(seed).choices(_LETTERS, k=tokens))


async def send_completion(
    session: aiohttp.ClientSession, url: str, prompt: str | list[int], output_tokens: int
) -> Sample:
    """One greedy completion of ``output_tokens`` tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] = {}
    texts: list[float] = []
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url} failed: {event['error']}")
            usage = event.get("usage") or usage
            piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
            if piece:
                texts.append(time.perf_counter())
    return Sample(
        sent_at=sent,
        piece_times=tuple(texts),
        finished_at=time.perf_counter(),
        input_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", len(texts)),
    )
