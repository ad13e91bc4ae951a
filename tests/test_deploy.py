"""``deploy``: the manifests are valid and agree with the code. None was run in a cluster."""

import re

import kubernetes_validate
import pytest

from molinkd.api.access_guard import PUBLIC_PATHS
from molinkd.cli.installation.torch_build import TORCH
from molinkd.peer.settings import SETTING_NAMES, Settings, apply_layer, read_environment
from tests.support import manifests
from tests.support.manifests import ROOT, Manifest, container, environment, find, workloads

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
SECRETS = {"molink-join/token": "t", "molink-api/key": "k", "molink/MODEL": "m"}
#: Variables of a container that aren't settings.
OTHERS = {"MODEL", "MOLINK_TOKEN"}


@pytest.fixture(params=["base", "gpu"])
def built(request: pytest.FixtureRequest) -> list[Manifest]:
    return manifests.build(request.param)


def test_they_are_what_kubernetes_takes(built: list[Manifest]) -> None:
    for one in built:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_the_schemas_bite() -> None:
    broken = find(manifests.build("base"), "StatefulSet", "molink-peer")
    container(broken)["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_selectors_find_what_they_name(built: list[Manifest]) -> None:
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(built)]
    for one in workloads(built):
        chosen = one["spec"]["selector"]["matchLabels"].items()
        assert chosen <= one["spec"]["template"]["metadata"]["labels"].items()
        find(built, "Service", one["spec"]["serviceName"])
    for one in (each for each in built if each["kind"] == "Service"):
        assert any(one["spec"]["selector"].items() <= each.items() for each in labels)


def test_settings_are_molinks_own(built: list[Manifest]) -> None:
    for one in workloads(built):
        given = environment(one, SECRETS, "pod-0")
        known = {f"MOLINK_{name.upper()}" for name in SETTING_NAMES} | OTHERS
        assert given.keys() <= known
        settings = apply_layer(read_environment(given), Settings(name="x"), "the manifest")
        assert settings.name == "pod-0"
        assert settings.api_key == "k"
        assert not settings.discovery


def test_ports_and_probes_are_the_endpoints(built: list[Manifest]) -> None:
    defaults = Settings(name="x")
    for one in workloads(built):
        ports = {port["name"]: port["containerPort"] for port in container(one)["ports"]}
        assert ports["endpoint"] == defaults.api_port
        assert ports["coordinator"] == defaults.coordinator_port
        assert ports["control"] == defaults.control_port
        assert ports.get("worker", defaults.worker_ports[0]) == defaults.worker_ports[0]
        for kind, path in (
            ("startup", "/health"),
            ("liveness", "/health"),
            ("readiness", "/readyz"),
        ):
            asked = container(one)[f"{kind}Probe"]["httpGet"]
            assert (asked["path"], asked["port"]) == (path, "endpoint")
            assert path in PUBLIC_PATHS, "a probe has no API key"


def test_a_pod_is_found_before_it_can_serve(built: list[Manifest]) -> None:
    """Peers must find each other first, so only the endpoint's service depends on readiness."""
    for one in (each for each in built if each["kind"] == "Service"):
        endpoint = one["metadata"]["name"] == "molink"
        assert one["spec"].get("publishNotReadyAddresses", False) is not endpoint


def test_nothing_runs_with_rights(built: list[Manifest]) -> None:
    user = int(re.findall(r"^USER (\d+)", DOCKERFILE, re.MULTILINE)[-1])
    for one in workloads(built):
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == user > 0
        assert not pod["automountServiceAccountToken"]
        inner = container(one)["securityContext"]
        assert inner["readOnlyRootFilesystem"]
        assert not inner["allowPrivilegeEscalation"]
        assert inner["capabilities"] == {"drop": ["ALL"]}


def test_layers_move_before_a_pod_ends(built: list[Manifest]) -> None:
    peer = find(built, "StatefulSet", "molink-peer")
    command = container(peer)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["molink", "drain", "--timeout"]
    grace = peer["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(command[3]) < grace - 30


def test_the_overlay_gives_each_peer_a_gpu() -> None:
    peer = container(find(manifests.build("gpu"), "StatefulSet", "molink-peer"))
    assert peer["resources"]["limits"]["nvidia.com/gpu"] == "1"
    given = {one["name"]: one.get("value") for one in peer["env"]}
    assert given["MOLINK_DEVICE"] == "cuda:0"
    assert given["MOLINK_MEMORY"] == "90%"
    assert len(given) == len(peer["env"]), "none is named twice"
    assert manifests.kustomization("gpu")["images"][0]["newTag"] == "cuda"
    plain = container(find(manifests.build("base"), "StatefulSet", "molink-peer"))
    assert "nvidia.com/gpu" not in plain["resources"]["limits"]


def test_the_model_is_named_in_one_place() -> None:
    (made,) = manifests.kustomization("base")["configMapGenerator"]
    assert made["name"] == "molink"
    assert made["literals"] == ["MODEL=molink-demo"]


def test_the_dockerfile() -> None:
    lines = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    copied = [
        source
        for step, rest in steps
        if step == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    let_in = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{source}" for source in copied} == {line for line in let_in if line[0] == "!"}
    last = dict(steps)
    assert last["ENTRYPOINT"] == '["molink"]'
    assert f"http://127.0.0.1:{Settings(name='x').api_port}/health" in last["HEALTHCHECK"]
    assert f"MOLINK_HOME={last['VOLUME']}/" in last["ENV"]
    assert f"ARG TORCH={TORCH}" in DOCKERFILE
