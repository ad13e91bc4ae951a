from typing import Any

import msgspec
import pytest

from molink.errors import ModelNotFound, NotAuthorized, RequestError
from molink.swarm.controller.desired_state import (
    decode_desired_models,
    describe_changes,
    resolve_desired_models,
    switch_model,
)
from molink.swarm.controller.records import DesiredModel
from molink.swarm.controller.registry import Registry
from molink.wire.messages.admin import DesiredModels, ModelSpec
from tests.support.fake_fleet import FACTS, GB, Kit


def facts(name: str, layers: int = 6) -> Any:
    return msgspec.structs.replace(FACTS, name=name, layers=layers)


def wish(name: str, layers: int = 6, **changed: Any) -> ModelSpec:
    return ModelSpec(model=facts(name, layers), **changed)


@pytest.fixture
def registry(kit: Kit) -> Registry:
    """Four PCs; ``c`` names its layers, ``d`` holds none."""
    found = Registry("s1", [kit.member(name) for name in "abcd"])
    stages = {"a": "auto", "b": "auto", "c": "1-2", "d": "none"}
    for name, stage in stages.items():
        found.record_report(name, kit.report(name, stage=stage, memory=10 * GB), True, 1.0)
    return found


def served(registry: Registry, *models: ModelSpec, molink: str = "") -> tuple[DesiredModel, ...]:
    return resolve_desired_models(DesiredModels(models=models, molink=molink), "a", registry)


def test_model_spec_resolves_to_desired_model(registry: Registry) -> None:
    (x,) = served(
        registry,
        wish(
            "x",
            replicas=2,
            min_stages=2,
            quantize="int8",
            kv_cache_dtype="int8",
            pins=(("B", "auto"), ("a", "auto")),
        ),
        molink="1",
    )
    assert x == DesiredModel(
        facts("x"),
        "a",
        quantize="int8",
        kv_cache_dtype="int8",
        replicas=2,
        min_stages=2,
        pins=(("a", "auto"), ("b", "auto")),
        applied=True,
    )


def test_pinning_a_pc_pins_its_other_devices(registry: Registry, kit: Kit) -> None:
    registry.add_member(kit.member("e"))
    registry.record_report("e", kit.report("e", pc="b", memory=10 * GB), True, 1.0)
    (x,) = served(registry, wish("x", pins=(("B", "auto"),)))
    assert x.pins == (("b", "auto"), ("e", "auto"))
    (x,) = served(registry, wish("x", pins=(("E", "auto"),)))
    assert x.pins == (("e", "auto"),)
    (x,) = served(registry, wish("x", pins=(("B", "1-3"), ("E", "4-6"))))
    assert x.pins == (("b", "1-3"), ("e", "4-6"))


@pytest.mark.parametrize(
    ("models", "why", "param"),
    [
        ([wish("x\x1b")], "printable", None),
        ([wish("x"), wish("x")], "^x: two models have this name", "models[0]"),
        (
            [wish("x", replicas=5), wish("y", replicas=4)],
            "9 pipelines requested; a swarm has at most 8",
            None,
        ),
        (
            [wish("x", pins=(("nobody", "auto"),))],
            "^x: no PC in this swarm is called nobody",
            "models[0].pins[0]",
        ),
        ([wish("x", pins=(("a", "auto"), ("A", "auto")))], "^x: a PC is pinned twice", "models[0]"),
        ([wish("x", pins=(("a", "4-"),))], "^x: layers of a must be A-B", "models[0].pins[0]"),
        (
            [wish("x", pins=(("a", "5-9"),))],
            "^x: a with layers 5-9 names layers",
            "models[0].pins[0]",
        ),
        (
            [wish("x", pins=(("c", "3-4"),))],
            "^x: c was started with `--stage 1-2`",
            "models[0].pins[0]",
        ),
        ([wish("x", pins=(("d", "auto"),))], "^x: d holds no layers now", "models[0].pins[0]"),
        (
            [wish("x", replicas=2, pins=(("a", "1-6"),))],
            "^x: pinned layers need one replica, not 2",
            "models[0]",
        ),
        (
            [wish("x", pins=(("a", "auto"),)), wish("y", pins=(("a", "auto"),))],
            "^y: A is pinned to x too",
            "models[1].pins[0]",
        ),
        ([wish("x", pins=(("a", "1-2"), ("b", "5-6")))], "^x: no PC holds layers 3-4", "models[0]"),
        (
            [wish("x", pins=(("a", "1-4"), ("b", "3-6")))],
            "^x: the layers of A .* overlap",
            "models[0]",
        ),
        ([wish("x", 60)], "^x: .*needs .* the swarm offers", "models[0]"),
        (
            [wish("x", 9), wish("y", 9), wish("z", 9)],
            "^z: the connected PCs have room",
            "models[2]",
        ),
    ],
)
def test_impossible_state_is_refused_as_a_whole(
    registry: Registry, models: list[ModelSpec], why: str, param: str | None
) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        served(registry, *models)
    assert caught.value.param == param


def test_surplus_replica_may_wait(registry: Registry) -> None:
    assert [one.replicas for one in served(registry, wish("x", replicas=8))] == [8]


def test_version_mismatch_names_both_versions(registry: Registry) -> None:
    with pytest.raises(RequestError, match=r"requires molink 2, but A runs 1, B runs 1") as caught:
        served(registry, wish("x"), molink="2")
    assert caught.value.param == "molink"


def test_malformed_payload_is_refused() -> None:
    whole = DesiredModels(models=(wish("x"),))
    assert decode_desired_models(memoryview(msgspec.msgpack.encode(whole))) == whole
    for payload in (None, memoryview(b""), memoryview(b"\xc1"), memoryview(b"\x80")):
        with pytest.raises(RequestError, match="names no models"):
            decode_desired_models(payload)


def test_changes_are_described_once(registry: Registry) -> None:
    before = (DesiredModel(facts("x"), "b", min_peers=2), DesiredModel(facts("gone"), "b"))
    after = served(registry, wish("x"), wish("y", replicas=2, objective="throughput"))
    assert describe_changes(before, after) == [
        "- gone is stopped",
        "~ x: managed by the file from now on",
        "+ y: 2 replicas, for throughput",
    ]
    assert describe_changes(after, after) == []
    # Neither the source nor the order matters.
    again = resolve_desired_models(
        DesiredModels(models=(wish("y", replicas=2, objective="throughput"), wish("x"))),
        "b",
        registry,
    )
    assert describe_changes(after, again) == []
    (other,) = served(registry, wish("x", min_stages=2, replicas=3))
    assert describe_changes(after[:1], (other,)) == ["~ x: replicas 1 -> 3, min_stages 0 -> 2"]
    (other,) = served(registry, wish("x", 7, pins=(("b", "auto"),)))
    assert describe_changes(after[:1], (other,)) == [
        "~ x: other files: all stages reload, other PCs or layers"
    ]


def test_one_of_several_models_stops_and_restarts(registry: Registry) -> None:
    models = served(registry, wish("x", 2), wish("y", 2, replicas=2))
    without = switch_model(models, "y", served=False)
    assert [one.num_pipelines for one in without] == [1, 0]
    with pytest.raises(RequestError, match="y is already stopped; start it with `molink run y`"):
        switch_model(without, "y", served=False)
    assert switch_model(without, "y", served=True) == models
    assert describe_changes(without, models) == ["~ y: served again"]
    with pytest.raises(RequestError, match="x is already served"):
        switch_model(models, "x", served=True)
    with pytest.raises(ModelNotFound, match="the swarm has no model z; its models are x, y"):
        switch_model(models, "z", served=False)
    with pytest.raises(ModelNotFound, match="no model z; it has no models"):
        switch_model((), "z", served=False)
    with pytest.raises(NotAuthorized, match="may stop y, or the PC that loaded it"):
        switch_model(models, "y", served=False, requester="b")
    # No file defines it, so it is removed.
    assert switch_model((DesiredModel(facts("x"), "b"),), "x", served=False, requester="b") == ()


def test_a_pc_is_pinned_by_its_id_before_another_of_that_name(registry: Registry, kit: Kit) -> None:
    report = msgspec.structs.replace(kit.report("e", memory=10 * GB), name="b")
    registry.add_member(kit.member("e"))
    registry.record_report("e", report, True, 1.0)
    assert served(registry, wish("x", pins=(("b", "auto"),)))[0].pins == (("b", "auto"),)
    assert served(registry, wish("x", pins=(("e", "auto"),)))[0].pins == (("e", "auto"),)
