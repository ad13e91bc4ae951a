"""Fixtures that every test may use."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from hypothesis import HealthCheck, settings

from molink.wire.messages.codec import Codec
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.curve import KeyPair
from molink.wire.sockets.loop import EventLoop
from molink.wire.sockets.server import Handler, Server
from molink.wire.sockets.zap import Gatekeeper

# How long examples take depends on what else the machine does.
settings.register_profile("molink", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("molink")

#: Fixtures that several folders share.
pytest_plugins = ["tests.support.swarm"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that ZeroMQ needs; pytest-asyncio's own choice on Windows is a Proactor loop."""
    return {"selector": EventLoop}


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 320

#: What small models of a family have beside what all have.
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 12},
    "phi3": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 10, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
}

MakeModel = Callable[..., Path]


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0–255 are bytes, 256–258 the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _make_model(
    folder: Path,
    family: str = "qwen2",
    seed: int = 0,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random small Hugging Face model of ``family`` into ``folder`` and return it.

    ``overrides`` are fields of its config. Weights are large enough for logits to differ clearly.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    settings |= FAMILY_FIELDS.get(family, {})
    config = AutoConfig.for_model(family, **(settings | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(0, 0.2)
            elif parameter.dim() == 1:
                # Gemma adds 1 to the weights of its norms.
                parameter.data.normal_(0 if family.startswith("gemma") else 1, 0.1)
            else:
                parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    _write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Make random small models: ``make_model(folder, family, seed, **config_fields) -> folder``.

    ``family`` is a ``model_type`` that molink supports. The folder has weights, configs, a
    byte-level ``tokenizer.json`` (259 ids) and a ChatML template.
    """
    return _make_model


async def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Wait until ``condition()`` holds; fails after ``timeout`` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110  any condition, not an event
            await asyncio.sleep(0.002)


class Net:
    """A ZeroMQ context with its gatekeeper on loopback; closes what it has made."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.context = zmq.asyncio.Context()
        self.gatekeeper = Gatekeeper(self.context)
        self.gatekeeper.start()
        self.keys = KeyPair.generate()
        self.until: Callable[..., Awaitable[None]] = until
        #: Have something closed after the test, before the context.
        self.at_end = stack.push_async_callback

    def member(self, user_id: str | None = None) -> KeyPair:
        """The keys of a new member."""
        keys = KeyPair.generate()
        self.gatekeeper.allow(keys.public, user_id)
        return keys

    def server(self, codec: Codec[Any], handler: Handler[Any], **options: Any) -> Server[Any]:
        """A server, listening on any port."""
        server = Server(self.context, self.keys, codec, self.gatekeeper, handler, **options)
        self._stack.push_async_callback(server.close)
        server.bind("127.0.0.1", (0, 1))
        return server

    def client(self, codec: Codec[Any], keys: KeyPair, port: int, **options: Any) -> Client[Any]:
        """A client that begins to connect to ``port``."""
        server_key = options.pop("server_key", self.keys.public)
        addresses = options.pop("addresses", [f"tcp://127.0.0.1:{port}"])
        heard = {key: options.pop(key) for key in list(options) if key.startswith("on_")}
        events: ClientEvents[Any] = ClientEvents(**heard)
        client = Client(self.context, keys, codec, server_key, addresses, events=events, **options)
        self._stack.push_async_callback(client.close)
        client.start()
        return client


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    """Sockets for a test; fails if one of its tasks outlives it."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        made = Net(stack)
        yield made
    made.gatekeeper.close()
    made.context.term()
    current = asyncio.current_task()
    assert asyncio.all_tasks() <= {*before, current}


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built from a copy, so that no old build mixes in."""
    root = Path(__file__).resolve().parent.parent
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    for name in ("molink", "daemon", "configs"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*command, str(copy / "dist"), str(copy)], check=True, capture_output=True)
    (wheel,) = (copy / "dist").glob("molink-*.whl")
    return wheel
