"""What a stage's place in the ring makes of its orders."""

from types import SimpleNamespace
from typing import Any

import pytest

from molink.head.request import HeadRequest
from molink.model.config import ModelConfig
from molink.model.rope import RopeConfig
from molink.wire.control import StageAddress
from molink.wire.data import Choice, Sampled, Sampling
from molink.wire.keys import KeyPair
from molink.wire.pipe import FormRing, Start
from molink.wire.profile import UNKNOWN
from molink.worker.place import Place

KEYS = KeyPair.generate()
PROMPT = tuple(range(9))


def config(rope: RopeConfig) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=10,
        hidden_size=8,
        layers=1,
        intermediate_size=8,
        norm_eps=1e-6,
        context=64,
        dtype="f32",
        eos_ids=(),
        heads=1,
        kv_heads=1,
        head_dim=8,
        attention_scale=1.0,
        windows=(0,),
        rope=rope,
    )


def place(rope: RopeConfig) -> Place:
    """That of a stage which is the whole ring."""
    start = Start(
        pipeline="p1",
        stage=0,
        stages=1,
        layers=(0, 1),
        model_dir="nowhere",
        dtype="f32",
        device="cpu",
        threads=1,
        public_key=KEYS.public,
        secret_key=KEYS.secret,
        bind="127.0.0.1",
        ports=(20000, 65000),
        kv_bytes=1 << 20,
        block_size=4,
        max_context=64,
    )
    me = StageAddress(peer="me", public_key=KEYS.public, addresses=(), port=1)
    order = FormRing(epoch=1, ring=(me,), blocks=16, micro_batches=1)
    stage: Any = SimpleNamespace(
        is_first=True, is_last=True, config=config(rope), travel_dtype="f32"
    )
    server: Any = SimpleNamespace(send=lambda *_: True)
    context: Any = None
    return Place(start, order, stage, context, server, UNKNOWN, print, print)


@pytest.mark.parametrize(
    ("rope", "cached"),
    [
        (RopeConfig(), 8),
        (RopeConfig(kind="longrope", factor=2.0, original_context=32), 8),
        (RopeConfig(kind="dynamic", factor=2.0, original_context=32), 0),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
async def test_only_keys_that_do_not_depend_on_their_request_are_shared(
    rope: RopeConfig, cached: int
) -> None:
    own = place(rope)
    try:
        head = own.ring._head
        assert head is not None
        found = []
        for key in ("first", "second"):
            head.submit(HeadRequest("d", key, PROMPT, len(PROMPT), 1, Sampling()), 0.0)
            batch = head.next(0.0)
            assert batch is not None
            tick = batch.volumes[0].header.tick
            rows = batch.volumes[0].header.rows[0]
            (emission,) = head.sampled(Sampled(tick, (Choice(rows.request, 9, 1),)), {}, 0.0)
            found.append(getattr(emission.message, "cached", None))
        assert found == [0, cached]
    finally:
        await own.close()


async def test_a_token_that_does_not_exist_fails_its_own_request_only() -> None:
    own = place(RopeConfig())
    try:
        ring = own.ring
        head = ring._head
        assert head is not None
        for key in ("bad", "good"):
            head.submit(HeadRequest("d", key, PROMPT, len(PROMPT), 4, Sampling()), 0.0)
        batch = head.next(0.0)
        assert batch is not None
        header = batch.volumes[0].header
        bad, good = (rows.request for rows in header.rows)
        ring.arrive(Sampled(header.tick, (Choice(bad, 9, 10), Choice(good, 9, 9))), None)
        assert head.live == [("d", "good")]
        assert head.stats()[0]["head_failed_total"] == 1
        assert ring.strays == 1
    finally:
        await own.close()
