"""Renders a conversation to a prompt with the model's chat template."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from molink.checkpoint.config_fields import read_bytes
from molink.errors import BrokenModel, RequestError
from molink.text.template_budget import (
    MAX_CPU_S,
    MAX_PRODUCED_CHARACTERS,
    TemplateBudget,
    TemplateTooCostly,
)
from molink.text.template_sandbox import SandboxEnvironment
from molink.text.tool_calls.template_style import ToolCallStyle, detect_call_style

#: Maximum characters of a template's source; public models have at most 30 000.
MAX_SOURCE_CHARACTERS = 256 * 1024
_TOOLS_PATTERN = re.compile(r"\btools\b")


class ChatTemplate:
    """A compiled chat template; ``render_prompt`` is thread-safe.

    ``special`` holds special tokens that templates use (``bos_token``, ``eos_token``, …), ``where``
    is the file for error messages; ``cpu_s`` and ``produced`` bound a rendering's CPU time and
    characters.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, Any],
        where: str,
        *,
        cpu_s: float = MAX_CPU_S,
        produced: int = MAX_PRODUCED_CHARACTERS,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise BrokenModel(
                f"{where}: the chat template is longer than {MAX_SOURCE_CHARACTERS} characters"
            )
        self.source = source
        self._special = dict(special)
        self._limits = (produced, cpu_s)
        self._lock = threading.Lock()
        self._environment = SandboxEnvironment()
        #: Whether the template has a ``developer`` role; otherwise ``system`` replaces it.
        self.knows_developer = "developer" in source
        self.takes_tools = _TOOLS_PATTERN.search(source) is not None
        try:
            self._template = self._environment.compile_bounded(source)
        except Exception as error:  # Jinja or Python's compiler; any exception is possible
            raise BrokenModel(f"{where}: the chat template is not valid: {error}") from error

    @cached_property
    def call_style(self) -> ToolCallStyle:
        """How the template expects tool calls of earlier answers."""
        return detect_call_style(
            self.source, lambda messages, tools: self.render_prompt(messages, tools=tools)
        )

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template renders only contents that are lists of parts.

        Templates of some vision models do.
        """
        probe = "molink"
        try:
            return probe not in self.render_prompt([{"role": "user", "content": probe}])
        except RequestError:
            return False

    def render_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render the prompt for ``messages``, up to the start of the answer.

        ``messages`` are JSON values, ``options`` further template variables (``enable_thinking``,
        …), and ``tools`` the callable tools.

        Raises:
            RequestError: the template refuses the messages, fails, or exceeds its budget.
        """
        variables = {
            "documents": None,
            "add_generation_prompt": True,
            **self._special,
            **(options or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
        }
        with self._lock:
            self._environment.budget = TemplateBudget(*self._limits)
            try:
                return self._template.render(variables)
            except TemplateTooCostly as error:
                raise RequestError(
                    f"the model's chat template is unusable: {error}", "messages"
                ) from None
            except Exception as error:  # a template is a program, which may raise anything
                reason = str(error) or type(error).__name__
                raise RequestError(
                    f"the model's chat template refuses these messages: {reason}", "messages"
                ) from error


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's chat templates; requests with tools may have a separate one."""

    default: ChatTemplate | None = None
    tool_use: ChatTemplate | None = None

    def select_template(self, *, tools: bool) -> ChatTemplate | None:
        """Return the template for a request with or without tools."""
        return self.tool_use if tools and self.tool_use is not None else self.default


def load_chat_templates(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, Any]
) -> ChatTemplates:
    """Load ``chat_template.jinja``, or the templates in the tokenizer config.

    Of named templates, only ``default`` and ``tool_use`` are used. A model without templates only
    completes text.

    Raises:
        BrokenModel: a template does not compile.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplates(ChatTemplate(read_bytes(path).decode("utf-8"), special, str(path)))
        except UnicodeDecodeError as error:
            raise BrokenModel(f"{path}: {error}; fetch the file again") from error
    where = str(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if source is None:
        source, where = _read_legacy_file(folder / "chat_template.json"), str(folder)
    named = _named_templates(source, where) if isinstance(source, list) else {"default": source}
    return ChatTemplates(
        _compile_template(named.get("default"), special, where),
        _compile_template(named.get("tool_use"), special, where),
    )


def _compile_template(source: Any, special: Mapping[str, Any], where: str) -> ChatTemplate | None:
    if source is None:
        return None
    if not isinstance(source, str):
        raise BrokenModel(f"{where}: chat_template is neither a text nor a list of named ones")
    return ChatTemplate(source, special, where)


def _named_templates(entries: list[Any], where: str) -> dict[str, Any]:
    try:
        return {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError):
        raise BrokenModel(f"{where}: chat_template is a list without names") from None


def _read_legacy_file(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any]).get("chat_template")
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: {error}; fetch the file again") from error
