"""LangChain against an endpoint: ``python langchain_client.py URL MODEL``."""

import json
import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """Return the weather of a city."""

    # Else the toy adds properties without end.
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=9)
    days: int = Field(ge=1, le=9)


def main(url: str, name: str) -> None:
    model = ChatOpenAI(
        base_url=url, api_key="-", model=name, max_tokens=400, temperature=0.5, seed=1
    )
    said = model.invoke("What is molink?")
    assert said.content
    assert said.usage_metadata["output_tokens"] > 0
    assert said.response_metadata["finish_reason"] in ("stop", "length")

    chunks = list(model.stream("What is molink?", stream_usage=True))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0

    logprobs = model.bind(logprobs=True, top_logprobs=2).invoke("Hello!").response_metadata
    assert len(logprobs["logprobs"]["content"][0]["top_logprobs"]) == 2

    bound = model.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage("Weather?")
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "Weather"
    assert set(call["args"]) == {"city", "days"}
    result = ToolMessage("warm", tool_call_id=call["id"])
    assert model.bind_tools([Weather]).invoke([asked, answer, result]).content is not None
    streamed = None
    for chunk in bound.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [one["name"] for one in streamed.tool_calls] == ["Weather"]

    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Weather, method=method).invoke("Weather?")
        assert isinstance(found, Weather), method

    responses = ChatOpenAI(
        base_url=url, api_key="-", model=name, max_tokens=400, use_responses_api=True
    )
    assert responses.invoke("What is molink?").text
    answer = responses.bind_tools([Weather], tool_choice="any").invoke([asked])
    assert answer.tool_calls[0]["name"] == "Weather"
    assert isinstance(responses.with_structured_output(Weather).invoke("Weather?"), Weather)
    parts = list(responses.stream("What is molink?"))
    assert "".join(part.text for part in parts)

    completion = OpenAI(base_url=url, api_key="-", model=name, max_tokens=9)
    assert completion.invoke("molink is")
    print(json.dumps({each: version(each) for each in ("langchain-openai", "langchain-core")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
