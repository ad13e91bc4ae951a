"""Scripted and recorded owner's actions."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from molink.facts.model import Quantize
from molinkd.api.administration import LocalModel, ModelProgress, PcSetting

TOKEN = "owner-token-of-the-tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class FakeAdministration:
    """Long actions yield ``progress`` and then raise ``error``."""

    progress: tuple[ModelProgress, ...] = (
        ModelProgress("fetching"),
        ModelProgress("fetching", 5, 10),
        ModelProgress("fetching", 10, 10),
    )
    error: Exception | None = None
    done: list[tuple[object, ...]] = field(default_factory=list)

    local: tuple[LocalModel, ...] = ()
    settings: tuple[PcSetting, ...] = (
        PcSetting("pause_times", "Hold no layers at these times", ""),
        PcSetting("keep_awake", "Prevent sleep", "true", ("true", "false"), "config.toml"),
    )
    peer_id: str = f"{0:016x}"
    quantize: Quantize = "none"

    async def pull_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        self.done.append(("pull", model))
        async for one in self._run():
            yield one

    async def serve_model(self, model: str) -> AsyncGenerator[ModelProgress, None]:
        self.done.append(("serve", model))
        async for one in self._run():
            yield one
        yield ModelProgress("asked", name=model)

    async def stop_model(self, name: str) -> None:
        self._record("stop", name)

    async def decide_pairing(self, code: str, *, refuse: bool) -> str:
        self._record("refuse" if refuse else "approve", code)
        return "lap"

    async def set_drained(self, drained: bool) -> None:
        self._record("drain", drained)

    async def list_settings(self) -> Sequence[PcSetting]:
        return self.settings

    async def change_setting(self, name: str, value: str) -> None:
        self._record("set", name, value)

    async def list_local_models(self) -> Sequence[LocalModel]:
        return self.local

    def _record(self, *action: object) -> None:
        self.done.append(action)
        if self.error is not None:
            raise self.error

    async def _run(self) -> AsyncGenerator[ModelProgress, None]:
        for one in self.progress:
            yield one
        if self.error is not None:
            raise self.error
