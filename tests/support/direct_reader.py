"""Reads prompts in a thread instead of a process, which would take a while to start."""

import asyncio

from molinkd.api.offer import LoadedModel
from molinkd.api.prompt_messages import TokenizedPrompts, TokenizePrompts
from molinkd.api.prompt_process import tokenize_prompts


class InlineReader:
    """Implements :class:`molinkd.api.prompt_reader.PromptTokenizer`."""

    async def tokenize_prompts(self, owner: str, offer: LoadedModel, body: bytes, *, chat: bool) -> TokenizedPrompts:
        model = offer.model
        ask = TokenizePrompts(
            str(model.folder), model.name, model.max_model_len, chat, body, offer.tool_call_parser
        )
        return await asyncio.to_thread(tokenize_prompts, ask, offer.tokenizer)

    async def close(self) -> None:
        pass
