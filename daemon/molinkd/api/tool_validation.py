"""The tools of a request: what is wrong with them, and which of them can be called."""

from typing import Any

from molink.errors import RequestError
from molink.text.chat_template import ChatTemplate
from molink.text.tool_calls.create import TOOL_CALL_FORMATS, AnswerFormat, detect_answer_format
from molink.text.tool_calls.schema import find_schema_problem
from molinkd.api.loaded_model import LoadedModel
from molinkd.api.openai_schema import ChatBody, NamedChoice


def choose_answer_format(loaded_model: LoadedModel, *, tools: bool) -> AnswerFormat:
    """How the model writes answers to requests with tools, or without."""
    tokenizer = loaded_model.tokenizer
    template = tokenizer.chat_templates.select_template(tools=tools)
    source = template.source if template is not None else ""
    return detect_answer_format(source, tokenizer.added_tokens, loaded_model.tool_call_parser)


def model_capabilities(loaded_model: LoadedModel) -> list[str]:
    """What the model can do beside completing text, by Ollama's names."""
    template = loaded_model.tokenizer.chat_templates.select_template(tools=True)
    if template is None:
        return []
    form = choose_answer_format(loaded_model, tools=True)
    calls = template.takes_tools and form.tool_calls is not None
    thinks = form.reasoning_tags is not None or form.tool_calls == "harmony"
    return [name for name, can in (("tools", calls), ("thinking", thinks)) if can]


def check_tool_support(loaded_model: LoadedModel, template: ChatTemplate) -> None:
    """See that the model can be told of tools, and that its calls can be told from text.

    Raises:
        RequestError: one of both fails.
    """
    name = loaded_model.model.name
    if not template.takes_tools:
        raise RequestError(f"`tools`: {name} can't use tools", "tools")
    if choose_answer_format(loaded_model, tools=True).tool_calls is None:
        known = ", ".join(TOOL_CALL_FORMATS)
        raise RequestError(
            f"`tools`: how {name} writes calls is not known; if it is one of {known}, the setting "
            "`tool_call_parser` says so",
            "tools",
        )


def callable_names(body: ChatBody) -> frozenset[str]:
    """Names of the tools that an answer may call."""
    if body.tool_choice == "none":
        return frozenset()
    return frozenset(tool.function.name for tool in body.tools or ())


def required_tools(body: ChatBody) -> dict[str, dict[str, Any] | None]:
    """The tools one of which has to be called, by name, with their parameters; none if none has."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return {}
    only = choice.function.name if isinstance(choice, NamedChoice) else None
    functions = [tool.function for tool in body.tools or ()]
    return {each.name: each.parameters for each in functions if only in (None, each.name)}


def tools_for_template(body: ChatBody) -> list[dict[str, Any]]:
    """The tools as chat templates take them; none where the answer may not call any.

    Raises:
        RequestError: two have one name, parameters are no JSON schema, or the choice is impossible.
    """
    tools = body.tools or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function"
        name = tool.function.name
        if name in names:
            raise RequestError(f"`{field}.name`: there are two tools {name!r}", f"{field}.name")
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
    """``schema`` with what templates take for granted."""
    taken = {"type": "object", "properties": {}}
    return schema | {name: value for name, value in taken.items() if name not in schema}


def _check_tool_choice(body: ChatBody, names: set[str]) -> None:
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not names:
        raise RequestError("`tool_choice`: there are no `tools`", "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        field = "tool_choice.function.name"
        raise RequestError(f"`{field}`: no tool is called {choice.function.name[:64]!r}", field)
