"""A process that renders chat templates, tokenizes texts and decodes images, all untrusted.

None of it can be interrupted, and a template may hold the GIL, so all run in a process that is
killed on timeout. It exits when its pipe closes, so that no orphan keeps working.
"""

import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec

from molink.checkpoint.config import ModelConfig
from molink.errors import MolinkError
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.worker_pipe import read_pipe, write_pipe
from molinkd.api.backend import ServedModel
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, CompletionBody, unpack_body
from molinkd.api.pooling.schema import RerankBody
from molinkd.api.prompt_tokenization import tokenize_chat, tokenize_completion, tokenize_ranking
from molinkd.api.prompt_worker_messages import (
    MAX_MESSAGE_BYTES,
    LoadTokenizer,
    PromptRefusal,
    PromptWorkerFault,
    PromptWorkerReply,
    PromptWorkerRequest,
    TokenizedPrompts,
    TokenizePrompts,
)
from molinkd.api.structured_output import compile_call_grammar, compile_grammar


def tokenize_prompts(request: TokenizePrompts, tokenizer: Tokenizer) -> TokenizedPrompts:
    """Tokenize the prompts of a request and compile its grammar.

    Raises:
        RequestError, ContextTooLong: the prompts are invalid or too long.
    """
    model = ServedModel(request.name, Path(request.folder), request.max_model_len, 0)
    loaded_model = LoadedModel(model, tokenizer, request.tool_call_parser)
    if request.kind == "ranking":
        ranking = unpack_body(request.body, RerankBody)
        return TokenizedPrompts(tuple(tokenize_ranking(ranking, loaded_model)))
    if request.kind == "chat":
        chat = unpack_body(request.body, ChatBody)
        sees = request.sees_images and chat.has_images
        vision = ModelConfig.load_folder(model.folder).vision if sees else None
        prompt = tokenize_chat(chat, loaded_model, vision)
        grammar = compile_call_grammar(chat, loaded_model, prompt.tail) or compile_grammar(
            chat, tokenizer
        )
        return TokenizedPrompts((prompt,), grammar)
    completion = unpack_body(request.body, CompletionBody)
    prompts = tuple(tokenize_completion(completion, loaded_model))
    return TokenizedPrompts(prompts, compile_grammar(completion, tokenizer))


def _handle_request(
    request: PromptWorkerRequest, tokenizers: dict[str, Tokenizer]
) -> PromptWorkerReply:
    try:
        if isinstance(request, LoadTokenizer):
            tokenizers[request.folder] = Tokenizer.open(Path(request.folder))
            return TokenizedPrompts()
        return tokenize_prompts(request, tokenizers[request.folder])
    except MolinkError as error:
        return PromptRefusal.from_error(error)
    except Exception:
        return PromptWorkerFault(traceback.format_exc())


def _read_requests(stream: BinaryIO, requests: "queue.SimpleQueue[PromptWorkerRequest]") -> None:
    decoder: msgspec.msgpack.Decoder[PromptWorkerRequest] = msgspec.msgpack.Decoder(
        PromptWorkerRequest
    )
    while (request := read_pipe(stream, decoder, MAX_MESSAGE_BYTES)) is not None:
        requests.put(request)
    os._exit(0)


def main() -> None:
    """Answer requests from standard input, one at a time, until it closes."""
    requests: queue.SimpleQueue[PromptWorkerRequest] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    tokenizers: dict[str, Tokenizer] = {}
    while True:
        write_pipe(
            sys.stdout.buffer, _handle_request(requests.get(), tokenizers), MAX_MESSAGE_BYTES
        )


if __name__ == "__main__":
    main()
