"""A process that reads prompts: renders templates and tokenizes texts, all of it hostile.

Neither can be interrupted, and a template holds the interpreter's lock all the while. So they run
in a process that is ended when it takes too long. It exits with its pipe: an orphan would go on
with what nobody waits for.
"""

import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec

from molink.errors import MolinkError
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.pipe import read_pipe, write_pipe
from molinkd.api.backend import ServedModel
from molinkd.api.constraint import call_constraint, read_constraint
from molinkd.api.offer import Offer
from molinkd.api.prompt_ids import chat_prompt, completion_prompts
from molinkd.api.prompt_messages import (
    MAX_MESSAGE,
    Answer,
    Ask,
    Fault,
    OpenModel,
    Prompts,
    ReadPrompts,
    Refusal,
)
from molinkd.api.schema import ChatBody, CompletionBody, decode_body


def read_prompts(ask: ReadPrompts, tokenizer: Tokenizer) -> Prompts:
    """The prompts of a request, and what its answer is held to.

    Raises:
        RequestError, ContextTooLong: they can't be read, or don't fit.
    """
    model = ServedModel(ask.name, Path(ask.folder), ask.context, 0)
    offer = Offer(model, tokenizer, ask.answer_format)
    if ask.chat:
        chat = decode_body(ask.body, ChatBody)
        prompt = chat_prompt(chat, offer)
        grammar = call_constraint(chat, offer, prompt.tail) or read_constraint(chat, tokenizer)
        return Prompts((prompt,), grammar)
    completion = decode_body(ask.body, CompletionBody)
    prompts = tuple(completion_prompts(completion, offer))
    return Prompts(prompts, read_constraint(completion, tokenizer))


def _answer(ask: Ask, tokenizers: dict[str, Tokenizer]) -> Answer:
    try:
        if isinstance(ask, OpenModel):
            tokenizers[ask.folder] = Tokenizer.open(Path(ask.folder))
            return Prompts()
        return read_prompts(ask, tokenizers[ask.folder])
    except MolinkError as error:
        return Refusal.of(error)
    except Exception:
        return Fault(traceback.format_exc())


def _listen(stream: BinaryIO, asks: "queue.SimpleQueue[Ask]") -> None:
    decoder: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
    while (ask := read_pipe(stream, decoder, MAX_MESSAGE)) is not None:
        asks.put(ask)
    os._exit(0)


def main() -> None:
    """Answer what comes over standard input, one after the other, until it ends."""
    asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, asks), daemon=True).start()
    tokenizers: dict[str, Tokenizer] = {}
    while True:
        write_pipe(sys.stdout.buffer, _answer(asks.get(), tokenizers), MAX_MESSAGE)


if __name__ == "__main__":
    main()
