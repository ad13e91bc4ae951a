"""Tokenizes prompts of clients.

Templates and texts are untrusted and may take long to process, so this runs in a process that can
be killed (``prompt_worker.py``).
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from molink.checkpoint.vision import VisionConfig
from molink.errors import ContextTooLong, RequestError
from molink.text.chat_template import ChatTemplate
from molink.text.tokenizer import build_fim_prompt
from molink.text.tool_calls.template_style import apply_call_style
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, ChatMessage, CompletionBody, ContentPart
from molinkd.api.pooling.schema import RerankBody
from molinkd.api.prompt_images import ConversationImages
from molinkd.api.prompt_worker_messages import PromptTokens
from molinkd.api.tool_validation import check_tool_support, tools_for_template

#: Template variables that clients can't set, since they carry the conversation.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
#: A text with more characters than this per token of context, plus some, can't fit.
_CHARACTERS_PER_TOKEN = 16
_EXTRA_CHARACTERS = 16 * 1024
#: Characters at the end of a prompt that determine how the answer starts.
_TAIL_CHARACTERS = 128
#: Roles in the template of a reranker. Those released without one are Qwen3's, of its model card.
_RANKING_ROLES = tuple(re.compile(rf"['\"]{role}['\"]") for role in ("query", "document"))
_RANKING_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_RANKING_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def tokenize_chat(
    body: ChatBody, loaded_model: LoadedModel, vision: VisionConfig | None = None
) -> PromptTokens:
    """Render and tokenize a conversation; a model with ``vision`` takes images in it.

    Raises:
        ContextTooLong: it can't fit the context.
        RequestError: unsupported content, no chat template, or the template rejects it.
        BrokenModel: the tokenizer doesn't know the tokens of images.
    """
    unsupported = {"echo": body.echo, "suffix": body.suffix, "best_of": (body.best_of or 1) != 1}
    for name in [name for name, value in unsupported.items() if value]:
        raise RequestError(f"`{name}` is not supported for conversations", name)
    tools = tools_for_template(body)
    template = loaded_model.tokenizer.chat_templates.select_template(tools=bool(tools))
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", "messages")
    if tools:
        check_tool_support(loaded_model, template)
    _check_messages(body.messages, loaded_model)
    _check_length(len(msgspec.json.encode(tools)), "tools", loaded_model)
    images = ConversationImages(vision)
    messages = [
        _plain_message(message, index, template, images)
        for index, message in enumerate(body.messages)
    ]
    if any("tool_calls" in message for message in messages):
        messages = apply_call_style(messages, template.call_style)
    options = dict(body.chat_template_kwargs or {})
    for name in _RESERVED.intersection(options):
        raise RequestError(f"`chat_template_kwargs.{name}` is reserved", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    text = template.render_prompt(messages, options, tools)
    tail = text[-_TAIL_CHARACTERS:]
    if images.cuts:
        _check_length(len(text), "messages", loaded_model)
        return images.encode_prompt(text, tail, loaded_model)
    return PromptTokens(_encode_text(text, "messages", loaded_model, special=False), tail=tail)


def tokenize_completion(body: CompletionBody, loaded_model: LoadedModel) -> list[PromptTokens]:
    """Tokenize the prompts of a completion: text, ids, or a list of either.

    Raises:
        ContextTooLong: a prompt can't fit the context.
        RequestError: a prompt is empty, of an invalid type, or has invalid ids.
    """
    prompt = body.prompt
    if isinstance(prompt, str) or _is_id_list(prompt):
        return [_tokenize_one(prompt, "prompt", body, loaded_model)]
    if not prompt:
        raise RequestError("`prompt`: the list is empty", "prompt")
    return [
        _tokenize_one(item, f"prompt[{index}]", body, loaded_model)
        for index, item in enumerate(prompt)
    ]


def tokenize_ranking(body: RerankBody, loaded_model: LoadedModel) -> list[PromptTokens]:
    """Render and tokenize a prompt for each document; only the documents differ.

    Raises:
        ContextTooLong: a prompt can't fit the context.
        RequestError: the model's template refuses the texts.
    """
    template = loaded_model.tokenizer.chat_template
    if template is not None and not all(role.search(template.source) for role in _RANKING_ROLES):
        template = None
    before = [] if body.instruction is None else [{"role": "system", "content": body.instruction}]
    before.append({"role": "query", "content": body.query})
    shared = len(body.query) + len(body.instruction or "")
    prompts = []
    for index, document in enumerate(body.texts):
        field = f"documents[{index}]"
        _check_length(shared + len(document), field, loaded_model)
        if template is None:
            text = _RANKING_PROMPT.format(
                instruction=body.instruction or _RANKING_INSTRUCTION,
                query=body.query,
                document=document,
            )
        else:
            text = template.render_prompt([*before, {"role": "document", "content": document}])
        prompts.append(PromptTokens(_encode_text(text, field, loaded_model, special=False)))
    return prompts


def _tokenize_one(
    prompt: Any, field: str, body: CompletionBody, loaded_model: LoadedModel
) -> PromptTokens:
    if isinstance(prompt, str):
        special = not body.suffix
        ids: Sequence[int] = _encode_text(
            prompt, field, loaded_model, special=special, empty=not special
        )
        return PromptTokens(_add_suffix(ids, body, loaded_model), prompt if body.echo else "")
    tokenizer = loaded_model.tokenizer
    if not isinstance(prompt, list) or not _is_id_list(prompt):
        raise RequestError(f"`{field}`: expected text or a list of token ids", field)
    for token in prompt:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(
                (f"`{field}`: token {token} is out of range; the model has {tokenizer.vocab_size}"),
                field,
            )
    text = tokenizer.decode(prompt, skip_special=False) if body.echo else ""
    return PromptTokens(_add_suffix(_require_ids(prompt, field), body, loaded_model), text)


def _add_suffix(
    ids: Sequence[int], body: CompletionBody, loaded_model: LoadedModel
) -> tuple[int, ...]:
    """Add the text after the answer for fill-in-the-middle, if given."""
    if not body.suffix:
        return tuple(ids)
    after = _encode_text(body.suffix, "suffix", loaded_model, special=False, empty=True)
    filled = build_fim_prompt(loaded_model.tokenizer, ids, after)
    if filled is None:
        text = f"`suffix`: {loaded_model.model.name} doesn't know how to fill a gap; leave it out"
        raise RequestError(text, "suffix")
    return tuple(filled)


def _encode_text(
    text: str, field: str, loaded_model: LoadedModel, *, special: bool = True, empty: bool = False
) -> tuple[int, ...]:
    """Tokenize ``text``, by default with a prompt's special tokens; ``empty`` allows no ids."""
    _check_length(len(text), field, loaded_model)
    ids = loaded_model.tokenizer.encode(text, special=special)
    return tuple(ids) if empty else _require_ids(ids, field)


def _check_messages(messages: Sequence[ChatMessage], loaded_model: LoadedModel) -> None:
    """Reject oversized conversations before rendering; each message takes a token."""
    name, max_model_len = loaded_model.model.name, loaded_model.model.max_model_len
    if len(messages) > max_model_len:
        raise ContextTooLong(
            f"`messages`: there are {len(messages)}, and the context of {name} is {max_model_len} "
            "tokens, the answer included",
            "messages",
        )
    texts = [message.content for message in messages]
    length = sum(len(text) for text in texts if isinstance(text, str))
    length += sum(
        len(part.text or "") for parts in texts if isinstance(parts, list) for part in parts
    )
    length += sum(
        len(msgspec.json.encode(call)) for message in messages for call in message.tool_calls or ()
    )
    _check_length(length, "messages", loaded_model)


def max_characters(loaded_model: LoadedModel) -> int:
    """Characters that a prompt may have; more can't fit the context."""
    return _CHARACTERS_PER_TOKEN * loaded_model.model.max_model_len + _EXTRA_CHARACTERS


def _check_length(length: int, field: str, loaded_model: LoadedModel) -> None:
    max_model_len = loaded_model.model.max_model_len
    if length > max_characters(loaded_model):
        raise ContextTooLong(
            f"`{field}`: the prompt has {length} characters, and the context of "
            f"{loaded_model.model.name} is {max_model_len} tokens, the answer included",
            field,
        )


def _is_id_list(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


def _require_ids(ids: Sequence[int], field: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError(f"`{field}`: the prompt is empty", field)
    return tuple(ids)


def _plain_message(
    message: ChatMessage, index: int, template: ChatTemplate, images: ConversationImages
) -> dict[str, Any]:
    """Return the message for the template: a dict with its content as one text, if it can be."""
    content: str | list[dict[str, str]] | None
    if isinstance(message.content, list):
        content = _plain_parts(message.content, index, images)
    else:
        content = message.content
    if content is None and not message.tool_calls:
        field = f"messages[{index}].content"
        raise RequestError(f"`{field}`: required", field)
    role = message.role
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" and not template.knows_developer else role,
        "content": content or "",
    }
    if isinstance(plain["content"], str) and template.wants_parts:
        plain["content"] = [{"type": "text", "text": plain["content"]}]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if role == "tool" and not message.tool_call_id:
        field = f"messages[{index}].tool_call_id"
        raise RequestError(f"`{field}`: required", field)
    if message.tool_calls:
        plain["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return plain


def _plain_parts(
    parts: Sequence[ContentPart], index: int, images: ConversationImages
) -> str | list[dict[str, str]]:
    """Texts joined with newlines, as vLLM does; with images, parts for the template."""
    plain: list[dict[str, str]] = []
    for place, part in enumerate(parts):
        field = f"messages[{index}].content[{place}]"
        if part.type == "image_url":
            images.add_image(part, field)
            plain.append({"type": "image"})
            continue
        if part.type != "text":
            raise RequestError(
                f"`{field}.type`: {part.type[:32]!r} is not supported, only 'text'", f"{field}.type"
            )
        if part.text is None:
            raise RequestError(f"`{field}.text`: required", f"{field}.text")
        plain.append({"type": "text", "text": part.text})
    if all(part["type"] == "text" for part in plain):
        return "\n".join(part["text"] for part in plain)
    return plain
