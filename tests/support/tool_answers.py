"""What models of several families answer that think, say something and call two tools."""

from pathlib import Path
from typing import Any

from tests.support import tool_templates
from tests.support.fake_backend import FakeBackend, build_model

HI: Any = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
PARIS = '{"city": "Paris, é"}'
CALL = '{"name": "get_weather", "arguments": ' + PARIS + "}"
NOW = '{"name": "now", "arguments": {}}'
ANSWERS = {
    "hermes": f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{NOW}</tool_call>",
    "thinking": f"Hm.\n</think>\n\nLet me see.<tool_call>{CALL}</tool_call><tool_call>{NOW}",
    "llama": f"Let me see.<|python_tag|>{CALL}; {NOW}",
    "mistral": f"Let me see.[TOOL_CALLS][{CALL}, {NOW}]",
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS}<|end|><|start|>assistant to=functions.now<|channel|>"
        "commentary json<|message|>{}"
    ),
}
CONTEXT = 8192


def backend_of(folder: Path, template: object, answer: str = "ok") -> FakeBackend:
    build_model(folder, template, tool_templates.SPECIAL, "<|call|>")
    return FakeBackend(folder, answer, context=CONTEXT)


def prompt_of(backend: FakeBackend) -> str:
    """The prompt that was asked for last."""
    return backend.tokenizer.decode(backend.requests[-1].prompt_token_ids, skip_special=False)
