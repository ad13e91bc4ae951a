"""Reads prompts in a thread instead of a process, which would take a while to start."""

import asyncio

from molinkd.api.offer import Offer
from molinkd.api.prompt_messages import Prompts, ReadPrompts
from molinkd.api.prompt_process import read_prompts


class DirectReader:
    """Implements :class:`molinkd.api.prompt_reader.PromptReader`."""

    async def read(self, owner: str, offer: Offer, body: bytes, *, chat: bool) -> Prompts:
        model = offer.model
        ask = ReadPrompts(
            str(model.folder), model.name, model.context, chat, body, offer.answer_format
        )
        return await asyncio.to_thread(read_prompts, ask, offer.tokenizer)

    async def close(self) -> None:
        pass
