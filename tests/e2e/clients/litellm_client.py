"""LiteLLM against an endpoint: ``python litellm_client.py URL MODEL``."""

import json
import sys
from importlib.metadata import version
from typing import Any

import litellm
from pydantic import BaseModel, ConfigDict, Field

HI = [{"role": "user", "content": "What is molink?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


class Weather(BaseModel):
    # Else the toy adds properties without end.
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=9)


def try_chat(tools: bool = True, **options: Any) -> None:
    """A chat through one of LiteLLM's providers: whole, streamed, with tools, with a form."""
    common = {"messages": HI, "max_tokens": 400, "temperature": 0.5, **options}
    answer = litellm.completion(**common)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**common, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = litellm.stream_chunk_builder(chunks, messages=HI)
    assert whole.choices[0].message.content
    formed = litellm.completion(**common, response_format=Weather)
    assert Weather.model_validate_json(formed.choices[0].message.content)
    if tools:
        try_tools(common)


def try_tools(common: dict[str, Any]) -> None:
    """A call, what came of it, and a call in a stream."""
    called = litellm.completion(**common, tools=TOOLS, tool_choice="required")
    (call, *_) = called.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "warm"}
        for each in called.choices[0].message.tool_calls
    ]
    talk = [*HI, called.choices[0].message.model_dump(exclude_none=True), *results]
    litellm.completion(**{**common, "messages": talk}, tools=TOOLS)
    chunks = list(litellm.completion(**common, tools=TOOLS, tool_choice="required", stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=HI)
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"


def main(url: str, name: str) -> None:
    litellm.suppress_debug_info = True
    root = url.removesuffix("/v1")
    try_chat(model=f"openai/{name}", base_url=url, api_key="-")
    # It takes `additionalProperties` off schemas, and the toy then adds some without end.
    try_chat(model=f"hosted_vllm/{name}", base_url=url, api_key="-", tools=False)
    try_chat(model=f"anthropic/{name}", base_url=root, api_key="-")
    for provider in ("ollama_chat", "ollama"):
        asked = {"model": f"{provider}/{name}", "api_base": root, "messages": HI}
        assert litellm.completion(**asked, max_tokens=99).choices[0].message.content
        chunks = list(litellm.completion(**asked, max_tokens=99, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    formed = litellm.completion(
        model=f"ollama_chat/{name}", api_base=root, messages=HI, response_format=Weather
    )
    assert Weather.model_validate_json(formed.choices[0].message.content)
    said = litellm.responses(model=f"openai/{name}", input="Hi!", api_base=url, api_key="-")
    assert said.output[0].content[0].text
    text = litellm.text_completion(
        model=f"text-completion-openai/{name}", prompt="molink is", api_base=url, api_key="-"
    )
    assert text.choices[0].text
    print(json.dumps({each: version(each) for each in ("litellm", "openai")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
