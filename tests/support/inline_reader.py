"""Reads prompts in a thread instead of a process, which would take a while to start."""

import asyncio

from molinkd.api.loaded_model import LoadedModel
from molinkd.api.prompt_worker import tokenize_prompts
from molinkd.api.prompt_worker_messages import TokenizedPrompts, TokenizePrompts


class InlineReader:
    """Implements :class:`molinkd.api.prompt_worker_pool.PromptTokenizer`."""

    async def tokenize_prompts(
        self, owner: str, offer: LoadedModel, body: bytes, *, chat: bool
    ) -> TokenizedPrompts:
        model = offer.model
        ask = TokenizePrompts(
            str(model.folder), model.name, model.max_model_len, chat, body, offer.tool_call_parser
        )
        return await asyncio.to_thread(tokenize_prompts, ask, offer.tokenizer)

    async def close(self) -> None:
        pass
