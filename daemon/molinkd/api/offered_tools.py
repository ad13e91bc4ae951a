"""The tools of a request: what is wrong with them, and which of them can be called."""

from typing import Any

from molink.errors import RequestError
from molink.text.calls.create import CALL_FORMATS, AnswerFormat, detect_format
from molink.text.calls.schema import schema_problem
from molink.text.template import ChatTemplate
from molinkd.api.offer import Offer
from molinkd.api.schema import ChatBody, NamedChoice


def answer_form(offer: Offer, *, tools: bool) -> AnswerFormat:
    """How the model writes answers to requests with tools, or without."""
    tokenizer = offer.tokenizer
    template = tokenizer.templates.choose(tools=tools)
    source = template.source if template is not None else ""
    return detect_format(source, tokenizer.added, offer.answer_format)


def abilities(offer: Offer) -> list[str]:
    """What the model can do beside completing text, by Ollama's names."""
    template = offer.tokenizer.templates.choose(tools=True)
    if template is None:
        return []
    form = answer_form(offer, tools=True)
    calls = template.takes_tools and form.calls is not None
    thinks = form.tags is not None or form.calls == "harmony"
    return [name for name, can in (("tools", calls), ("thinking", thinks)) if can]


def check_model(offer: Offer, template: ChatTemplate) -> None:
    """See that the model can be told of tools, and that its calls can be told from text.

    Raises:
        RequestError: one of both fails.
    """
    name = offer.model.name
    if not template.takes_tools:
        raise RequestError(f"`tools`: {name} can't use tools", "tools")
    if answer_form(offer, tools=True).calls is None:
        known = ", ".join(CALL_FORMATS)
        raise RequestError(
            f"`tools`: how {name} writes calls is not known; if it is one of {known}, the setting "
            "`answer_format` says so",
            "tools",
        )


def offered_names(body: ChatBody) -> frozenset[str]:
    """Names of the tools that an answer may call."""
    if body.tool_choice == "none":
        return frozenset()
    return frozenset(tool.function.name for tool in body.tools or ())


def enforced_tools(body: ChatBody) -> dict[str, dict[str, Any] | None]:
    """The tools one of which has to be called, by name, with their parameters; none if none has."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return {}
    only = choice.function.name if isinstance(choice, NamedChoice) else None
    functions = [tool.function for tool in body.tools or ()]
    return {each.name: each.parameters for each in functions if only in (None, each.name)}


def tools_in_prompt(body: ChatBody) -> list[dict[str, Any]]:
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
        problem = schema_problem(tool.function.parameters or {})
        if problem is not None:
            path, reason = f"{field}.parameters{problem[0]}", problem[1]
            raise RequestError(f"`{path}`: {reason}", path)
    _check_choice(body, names)
    if body.tool_choice == "none":
        return []
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": _whole_parameters(tool.function.parameters or {}),
            },
        }
        for tool in tools
    ]


def _whole_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with what templates take for granted."""
    taken = {"type": "object", "properties": {}}
    return schema | {name: value for name, value in taken.items() if name not in schema}


def _check_choice(body: ChatBody, names: set[str]) -> None:
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not names:
        raise RequestError("`tool_choice`: there are no `tools`", "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        field = "tool_choice.function.name"
        raise RequestError(f"`{field}`: no tool is called {choice.function.name[:64]!r}", field)
