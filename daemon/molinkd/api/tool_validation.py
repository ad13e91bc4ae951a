"""Validates the tools of a request and selects those that may be called."""

from typing import Any

from molink.errors import RequestError
from molink.text.chat_template import ChatTemplate
from molink.text.tool_calls.create import AnswerFormat, detect_answer_format
from molink.text.tool_calls.formats import TOOL_CALL_FORMATS
from molink.text.tool_calls.schema import find_schema_problem
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, NamedChoice


def choose_answer_format(loaded_model: LoadedModel, *, tools: bool) -> AnswerFormat:
    """Return how the model writes answers, to requests with ``tools`` or without."""
    tokenizer = loaded_model.tokenizer
    template = tokenizer.chat_templates.select_template(tools=tools)
    source = template.source if template is not None else ""
    return detect_answer_format(source, tokenizer.added_tokens, loaded_model.tool_call_parser)


def model_capabilities(loaded_model: LoadedModel) -> list[str]:
    """List the model's capabilities besides completion, by Ollama's names."""
    sees = ["vision"] * loaded_model.model.sees_images
    template = loaded_model.tokenizer.chat_templates.select_template(tools=True)
    if template is None:
        return sees
    form = choose_answer_format(loaded_model, tools=True)
    calls = template.takes_tools and form.tool_calls is not None
    thinks = form.reasoning_tags is not None or form.tool_calls == "harmony"
    return [*(name for name, can in (("tools", calls), ("thinking", thinks)) if can), *sees]


def check_tool_support(loaded_model: LoadedModel, template: ChatTemplate) -> None:
    """Check that the chat template accepts tools and that calls can be parsed.

    Raises:
        RequestError: the model does not support tools.
    """
    name = loaded_model.model.name
    if not template.takes_tools:
        raise RequestError(f"`tools`: {name} does not support tools", "tools")
    if choose_answer_format(loaded_model, tools=True).tool_calls is None:
        known = ", ".join(TOOL_CALL_FORMATS)
        raise RequestError(
            f"`tools`: the tool call format of {name} is unknown; if it is one of {known}, "
            "set `tool_call_parser`",
            "tools",
        )


def callable_tools(body: ChatBody) -> dict[str, dict[str, Any] | None]:
    """Return the tools that the answer may call, with their parameters."""
    if body.tool_choice == "none":
        return {}
    return {tool.function.name: tool.function.parameters for tool in body.tools or ()}


def required_tools(body: ChatBody) -> dict[str, dict[str, Any] | None]:
    """Return the tools of which one must be called, with their parameters; empty if none must."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return {}
    only = choice.function.name if isinstance(choice, NamedChoice) else None
    functions = [tool.function for tool in body.tools or ()]
    return {each.name: each.parameters for each in functions if only in (None, each.name)}


def tools_for_template(body: ChatBody) -> list[dict[str, Any]]:
    """Return the tools for the chat template; empty if the answer may not call any.

    Raises:
        RequestError: duplicate names, invalid parameters or an impossible choice.
    """
    tools = body.tools or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function"
        name = tool.function.name
        if name in names:
            raise RequestError(f"`{field}.name`: duplicate tool {name!r}", f"{field}.name")
        names.add(name)
        problem = find_schema_problem(tool.function.parameters or {})
        if problem is not None:
            path, reason = f"{field}.parameters{problem[0]}", problem[1]
            raise RequestError(f"`{path}`: {reason}", path)
    _check_tool_choice(body, names)
    if body.tool_choice == "none":
        return []
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": _complete_parameters(tool.function.parameters or {}),
            },
        }
        for tool in tools
    ]


def _complete_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that chat templates assume."""
    taken = {"type": "object", "properties": {}}
    return schema | {name: value for name, value in taken.items() if name not in schema}


def _check_tool_choice(body: ChatBody, names: set[str]) -> None:
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not names:
        raise RequestError("`tool_choice`: requires `tools`", "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        field = "tool_choice.function.name"
        raise RequestError(f"`{field}`: no tool named {choice.function.name[:64]!r}", field)
