"""Reads prompts in a thread instead of a process, which would take a while to start."""

import asyncio

from molinkd.api.model_catalog import LoadedModel
from molinkd.api.prompt_worker import tokenize_prompts
from molinkd.api.prompt_worker_messages import PromptBody, TokenizedPrompts, TokenizePrompts


class InlineReader:
    """Implements :class:`molinkd.api.prompt_worker_pool.PromptTokenizer`."""

    async def tokenize_prompts(
        self, client: str, loaded_model: LoadedModel, body: PromptBody
    ) -> TokenizedPrompts:
        request = TokenizePrompts.from_body(body, loaded_model)
        return await asyncio.to_thread(tokenize_prompts, request, loaded_model.tokenizer)

    async def close(self) -> None:
        pass
