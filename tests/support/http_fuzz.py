"""Seeded hostile requests: almost valid bodies, and almost valid HTTP."""

import json
import random
from collections.abc import Callable
from typing import Any

Random = random.Random

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "enum": [1, 2]}},
            "required": ["x"],
        },
    },
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "user", "content": "naïve 🦊", "name": "n"},
    ],
    "max_completion_tokens": 4,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"enable_thinking": False},
}
TOOLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": ["hello", [5, 6, 7]],
    "max_tokens": 4,
    "logprobs": 1,
    "echo": False,
}
COMMON: dict[str, Any] = {
    "stream": False,
    "stream_options": {"include_usage": True},
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.05,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "stop": ["x", "yy"],
    "stop_token_ids": [3],
    "ignore_eos": False,
    "tools": None,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "it",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "b": {}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "user": "someone",
}
#: Bodies of the other protocols' routes.
OTHERS: dict[str, dict[str, Any]] = {
    "/api/chat": {
        "model": "tiny:latest",
        "messages": [
            {"role": "user", "content": "hello", "images": []},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "tool_name": "f", "content": "1"},
        ],
        "tools": [TOOL],
        "stream": False,
        "options": {"num_predict": 4, "stop": ["x"], "top_k": 3, "seed": 7},
        "keep_alive": "5m",
        "think": False,
        "logprobs": True,
    },
    "/api/generate": {
        "model": "tiny",
        "prompt": "hello",
        "system": "be brief",
        "raw": False,
        "stream": False,
        "format": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}},
        "options": {"num_predict": 4, "temperature": 0.5},
    },
    "/api/show": {"model": "tiny", "verbose": False},
    "/v1/responses": {
        "model": "tiny",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "1"},
        ],
        "max_output_tokens": 4,
        "tools": [{"type": "function", **TOOL["function"]}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "1"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": TOOL["function"]["parameters"]}],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
    },
    "/v1/messages/count_tokens": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
    },
    "/v1/embeddings": {
        "model": "embedder",
        "input": ["hello", [5]],
        "encoding_format": "base64",
        "dimensions": 3,
    },
    "/api/embed": {"model": "embedder", "input": ["hello"], "truncate": True},
    "/v1/rerank": {"model": "ranker", "query": "x", "documents": ["hello", {"text": "x"}]},
}
TEXTS = (
    "",
    "x",
    "\x00",
    "\ud800",
    "🦊",
    "‮",
    "a" * 300,
    "{{ messages }}",
    "<|end|>",
    "\r\n",
    "9" * 30,
)
NUMBERS = (
    *(0, 1, -1, 2, 64, 65, 129, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.0, -0.0, 0.1, 1.5, 1e-300, 5e-324, 1e-7, 1e300, 1.7e308, 10**400),
)
#: Longer ones are cut off, in bytes: well over what an endpoint takes, soon sent all the same.
MAX_BODY = 4 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")


def _nested(rng: Random) -> Any:
    value: Any = rng.choice([0, "x", None])
    for _ in range(rng.choice([1, 5, 40, 400])):
        value = [value] if rng.random() < 0.5 else {"content": value}
    return value


def _value(rng: Random) -> Any:
    """Any JSON value, and some that JSON does not have."""
    makers: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False]),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice(ROLES),
        lambda: rng.choice([float("nan"), float("inf"), float("-inf")]),
        lambda: rng.choice([[], {}, [[]], [None], {"": {}}, {"type": "text"}]),
        lambda: [rng.choice(NUMBERS) for _ in range(rng.choice([1, 3, 70, 600]))],
        lambda: {str(rng.choice(NUMBERS)): rng.choice(NUMBERS) for _ in range(rng.randrange(300))},
        lambda: [{"role": rng.choice(ROLES), "content": rng.choice(TEXTS)}] * rng.choice([1, 700]),
        lambda: _nested(rng),
    ]
    return rng.choice(makers)()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in ``value`` that can hold another value, as container and key."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:20]))
    else:
        return found
    for key, inner in items:
        found.append((value, key))
        found += _places(inner)
    return found


def _mutate(body: dict[str, Any], rng: Random) -> None:
    container, key = rng.choice(_places(body) or [(body, "model")])
    what = rng.random()
    if what < 0.6:
        container[key] = _value(rng)
    elif what < 0.75:
        body[rng.choice([*COMMON, *CHAT, *COMPLETION])] = _value(rng)
    elif what < 0.85 and isinstance(container, dict):
        container.pop(key, None)
    elif isinstance(container, dict):
        container[str(key) + rng.choice(["", "_", "\x00", "$"])] = container.get(key)
    else:
        container[key] = [container[key]] * rng.choice([0, 2, 100])


def _damage(data: bytes, rng: Random) -> bytes:
    """Corrupt ``data``: invalid JSON, invalid UTF-8, or missing bytes."""
    place = rng.randrange(len(data) + 1)
    junk = [b"\xff", b"\x00", b"\xc3", b"\xed\xa0\x80", b"NaN", b"{", b"]", b'"', b"\\u", b"1e999,"]
    what = rng.randrange(4)
    if what == 0:
        return data[:place]
    if what == 1:
        return data[:place] + rng.choice(junk) + data[place:]
    if what == 2:
        return b"\xef\xbb\xbf" + data
    return data[:place] + data[place + rng.randrange(1, 20) :]


def random_body(rng: Random) -> tuple[str, bytes]:
    """A route under ``/v1`` and a body for it."""
    chats = rng.random() < 0.5
    body: dict[str, Any] = json.loads(json.dumps(CHAT if chats else COMPLETION))
    if chats and rng.random() < 0.5:
        body |= json.loads(json.dumps(TOOLS))
    for name in rng.sample(list(COMMON), rng.randrange(5)):
        body[name] = json.loads(json.dumps(COMMON[name]))
    return ("chat/completions" if chats else "completions"), _spoilt(body, rng)


def random_other(rng: Random) -> tuple[str, bytes]:
    """A path of another protocol and a body for it."""
    path = rng.choice(list(OTHERS))
    return path, _spoilt(json.loads(json.dumps(OTHERS[path])), rng)


def _spoilt(body: dict[str, Any], rng: Random) -> bytes:
    for _ in range(rng.randrange(4)):
        _mutate(body, rng)
        if len(json.dumps(body)) > MAX_BODY:
            break  # each further change could make it a hundred times larger
    ascii_only = rng.random() < 0.5
    data = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        data = _damage(data, rng)
    return data[:MAX_BODY]


_HEADERS = (
    "Content-Length: -1",
    "Content-Length: 1",
    "Content-Length: 99",
    "Content-Length: 99999999999999999999999",
    "Content-Length: 0x10",
    "Content-Length: 5\r\nContent-Length: 6",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Transfer-Encoding: nonsense",
    "Content-Encoding: gzip",
    "Content-Encoding: zstd",
    "Content-Type: text/plain",
    "Content-Type: application/json; charset=\xff",
    "Host: evil.example",
    "Host: localhost\r\nHost: localhost",
    "Origin: http://evil.example",
    "Expect: 100-continue",
    "Expect: nonsense",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Connection: close",
    "Connection: keep-alive, upgrade\r\nUpgrade: h2c",
    "Authorization: Bearer \xff",
    "Range: bytes=0-1",
    "If-None-Match: *",
    "X: " + "y" * 20_000,
    "\r\n".join(f"X{number}: y" for number in range(300)),
    "no header at all",
    ": nameless",
    "X\x00Y: z",
    " folded: header",
    "Cookie: " + "a=b; " * 500,
)
_METHODS = (
    "GET",
    "POST",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "CONNECT",
    "TRACE",
    "get",
    "P\x00",
    "é",
)
_PATHS = (
    *("/health", "/readyz", "/metrics", "/", "/v1/models", "/v1/models/tiny", "/v1/completions"),
    *("/v1/chat/completions", "*", "", "//", "/%", "/%00", "/%ff%fe", "/../../x", "/v1/models/%2e"),
    *("http://evil.example/v1/models", "http://[::1", "/\xff", "/?model=\xff", "/readyz?model=%00"),
    *("localhost:80", "/" + "a" * 9000, "/v1/models/" + "%41" * 500),
)
_VERSIONS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTP/1", "")
_CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"-1\r\n",
    b"ffffffffffffffffff\r\n",
    b"5\r\nhel",
    b"0\r\n\r\n",
    b"zz\r\n",
)


def random_bytes(rng: Random) -> bytes:
    """Bytes that a client may send to an HTTP port: one or several requests, complete or not."""
    data = b""
    for _ in range(rng.choice([1, 1, 1, 2, 40])):
        lines = [f"{rng.choice(_METHODS)} {rng.choice(_PATHS)} {rng.choice(_VERSIONS)}"]
        if rng.random() < 0.9:
            lines.append("Host: localhost")
        route, body = random_body(rng)
        if rng.random() < 0.5:
            lines[0] = f"POST /v1/{route} HTTP/1.1"
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += rng.sample(_HEADERS, rng.choice([0, 0, 1, 2]))
        head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        data += head + rng.choice([b"", body, body, rng.choice(_CHUNKS), rng.randbytes(30)])
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.1:
        data = rng.randbytes(rng.choice([1, 100, 10_000])) + data
    return data
