"""The commands of the containers in ``deploy``, as plain processes, with the manifests' probes."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.support import manifests
from tests.support.manifests import Manifest, container, find
from tests.support.processes import Process, Tools, environment, wait_for

README = (manifests.ROOT / "deploy" / "README.md").read_text(encoding="utf-8")


class Pod:
    """A pod's process without a container: on loopback, on any free ports."""

    def __init__(
        self, workload: Manifest, folder: Path, secrets: dict[str, str], tools: type[Tools]
    ) -> None:
        self.workload = workload
        name = f"{workload['metadata']['name']}-0"
        given = manifests.environment(workload, secrets, name)
        arguments = manifests.arguments(workload, given)
        # Other names and ports than in a cluster, where each pod has an address of its own.
        place = tools.local_options("--coordinator-port", "0")
        self.given = {**given, "MOLINK_ADVERTISE": "127.0.0.1", "MOLINK_API_HOST": "127.0.0.1"}
        arguments = [re.sub(r"^molink-coordinator\..*", "127.0.0.1", one) for one in arguments]
        self.process = Process(folder / name, [*arguments, *place], variables=self.given)

    def answers(self, probe: str) -> bool:
        """Whether a probe of the manifest succeeds."""
        path = container(self.workload)[f"{probe}Probe"]["httpGet"]["path"]
        url = self.process.found().endpoints[0] + path
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(200 <= answer.status < 400)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:  # it is busy, or ends
            return False

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """As ``kubectl exec`` or a hook would run it."""
        assert command[0] == "molink"
        return subprocess.run(
            [sys.executable, "-m", "molinkd", *command[1:]],
            env={**environment(self.process.home.root), **self.given},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=150,
        )


def test_a_swarm_of_what_the_manifests_run(tools: type[Tools], tmp_path: Path) -> None:
    built, pods = manifests.build("base"), list[Pod]()
    literals = manifests.kustomization("base")["configMapGenerator"][0]["literals"]
    secrets = {f"molink/{key}": value for key, _, value in (one.partition("=") for one in literals)}
    secrets["molink-api/key"] = "key"

    def start(name: str) -> Pod:
        pods.append(Pod(find(built, "StatefulSet", name), tmp_path, secrets, tools))
        return pods[-1]

    try:
        coordinator = start("molink-coordinator")
        wait_for(lambda: coordinator.answers("startup"), coordinator.process)
        assert coordinator.answers("liveness")
        assert not coordinator.answers("readiness"), "nobody holds layers yet"
        # The README's command creates the secret.
        told = re.search(r"exec molink-coordinator-0 -- (molink invite [^)]*)\)", README)
        assert told is not None
        made = coordinator.run(*told[1].split())
        assert made.returncode == 0, made.stderr
        secrets["molink-join/token"] = made.stdout.strip()
        peer = start("molink-peer")
        wait_for(lambda: peer.answers("startup"), peer.process)
        for pod in pods:
            wait_for(lambda pod=pod: pod.answers("readiness"), pod.process)
        # Before it ends it tries to drain; no other PC can take its layers.
        hook = container(peer.workload)["lifecycle"]["preStop"]["exec"]["command"]
        drained = peer.run(*[*hook[:3], "1"])
        assert (drained.returncode, "still holds layers" in drained.stderr) == (6, True)
        assert peer.answers("readiness")
        peer.process.stop()
        assert peer.process.process.returncode in (0, 130), os.linesep + peer.process.output
        wait_for(lambda: not coordinator.answers("readiness"), coordinator.process)
        # With the same volume it restarts as the same peer.
        again = start("molink-peer")
        wait_for(lambda: coordinator.answers("readiness"), again.process)
        assert len(coordinator.process.status()["peers"]) == 2
    finally:
        for pod in reversed(pods):
            pod.process.stop()
