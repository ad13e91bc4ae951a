"""Streams completions from an OpenAI-style server and takes the time of every piece."""

import asyncio
import json
import random
import string
import time
from collections.abc import Sequence

import aiohttp

from molink.bench.sample import Sample

_LETTERS = string.ascii_lowercase.replace("h", "")  # "th" is one token of the bench model


def make_prompt(tokens: int, seed: int) -> str:
    """Text of about ``tokens`` tokens for the tokenizer of the bench model: a letter is a token."""
    return "".join(random.Random(seed).choices(_LETTERS, k=tokens))


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str | list[int],
    output_tokens: int,
    stop: asyncio.Event | None = None,
    pieces: list[str] | None = None,
) -> Sample:
    """One greedy completion of ``output_tokens`` tokens, or of those until ``stop`` is set.

    The answer's text goes into ``pieces``, if that is given.
    """
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, texts, usage = time.perf_counter(), [], {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if stop is not None and stop.is_set():
                break
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url} failed: {event['error']}")
            usage = event.get("usage") or usage
            piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
            if piece:
                texts.append(time.perf_counter())
                if pieces is not None:
                    pieces.append(piece)
    return Sample(
        sent_at=sent,
        piece_times=tuple(texts),
        finished_at=time.perf_counter(),
        input_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", len(texts)),
    )


async def complete_all(url: str, prompts: Sequence[str], output_tokens: int) -> list[Sample]:
    """All prompts at once."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        asked = (complete(session, url, prompt, output_tokens) for prompt in prompts)
        return list(await asyncio.gather(*asked))


def complete_round(
    url: str, index: int, streams: int, input_tokens: int, output_tokens: int
) -> list[Sample]:
    """``streams`` completions at once, of prompts that no round with another ``index`` has."""
    seeds = range(index * streams, (index + 1) * streams)
    prompts = [make_prompt(input_tokens, seed) for seed in seeds]
    return asyncio.run(complete_all(url, prompts, output_tokens))


def aggregate_rate(samples: Sequence[Sample]) -> float:
    """Output tokens/s of requests that were sent together: all tokens by the whole time."""
    tokens = sum(sample.output_tokens for sample in samples)
    begin, end = min(s.sent_at for s in samples), max(s.finished_at for s in samples)
    return tokens / (end - begin)


def decode_rate(samples: Sequence[Sample]) -> float:
    """Output tokens/s while all of them decode: from the last first token to the first end."""
    begin, end = max(s.first_at for s in samples), min(s.finished_at for s in samples)
    tokens = sum(1 for s in samples for at in s.piece_times if begin < at <= end)
    return tokens / (end - begin)
