"""The Kubernetes manifests of ``deploy``, built by the parts of kustomize that they use."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"

Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]


def kustomization(folder: str) -> Manifest:
    (found,) = read(KUBERNETES / folder / "kustomization.yaml")
    return found


def build(folder: str) -> list[Manifest]:
    """All resources of a kustomization with its patches; images and namespaces are left as is."""
    made, described = [], kustomization(folder)
    for resource in described["resources"]:
        path = KUBERNETES / folder / resource
        made += build(str(path.resolve().relative_to(KUBERNETES))) if path.is_dir() else read(path)
    for patch in described.get("patches", ()):
        (target,) = [one for one in made if _is_meant(one, patch["target"])]
        for operation in yaml.safe_load(patch["patch"]):
            _apply(target, operation)
    return made


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [one for one in manifests if _is_meant(one, {"kind": kind, "name": name})]
    return found


def container(workload: Manifest) -> Manifest:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    found: Manifest = only
    return found


def workloads(manifests: list[Manifest]) -> Iterator[Manifest]:
    return (one for one in manifests if one["kind"] == "StatefulSet")


def environment(workload: Manifest, secrets: dict[str, str], name: str) -> dict[str, str]:
    """The environment of a container's ``env``, with ``secrets`` by ``NAME/KEY``."""
    values = {}
    for one in container(workload)["env"]:
        source = one.get("valueFrom")
        if source is None:
            values[one["name"]] = one["value"]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.name"
            values[one["name"]] = name
        else:
            (reference,) = source.values()
            values[one["name"]] = secrets[f"{reference['name']}/{reference['key']}"]
    return values


def arguments(workload: Manifest, environment: dict[str, str]) -> list[str]:
    """A container's ``args``, with ``$(NAME)`` replaced as Kubernetes does it."""
    filled = []
    for argument in container(workload)["args"]:
        for name, value in environment.items():
            argument = argument.replace(f"$({name})", value)
        assert "$(" not in argument
        filled.append(argument)
    return filled


def _is_meant(manifest: Manifest, target: Manifest) -> bool:
    return (manifest["kind"], manifest["metadata"]["name"]) == (target["kind"], target["name"])


def _apply(target: Manifest, operation: Manifest) -> None:
    """The used part of JSON patch (RFC 6902)."""
    *way, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
    place: Any = target
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    value = copy.deepcopy(operation["value"])
    match operation["op"], place:
        case "add", list() if last == "-":
            place.append(value)
        case "add", dict():
            place[last] = value
        case "replace", list():
            place[int(last)] = value
        case _:
            raise AssertionError(f"{operation['op']} at {operation['path']} is not known here")
