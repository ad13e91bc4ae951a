"""``python -m tools.evening.worker PC``: a stage of a PC of the evening.

It holds whatever layers its daemon says and computes none of them: each step takes as long as the
PC's device would need for as many layers of the model that is emulated, times what a file says at
that moment. So a PC becomes hot while it serves, and what it measures when it loads is measured
hot. ``PC`` is a file with a :class:`Computer`.
"""

import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from molink.facts.dtypes import WeightDType
from molink.facts.profile import Profile
from molink.sim.profiles import load_device, load_model
from molink.sim.roofline import Roofline
from molink.wire.messages.worker_pipe import LoadStage
from molinkd.worker.daemon_pipe import exit_process
from molinkd.worker.engine import HandOver, StageConfig, StageEngine
from molinkd.worker.request_table import RequestTable
from tools.emulation.activations import Activations
from tools.emulation.executor import EmulatedExecutor
from tools.emulation.worker import run

DTYPE: WeightDType = "bf16"


class Computer(msgspec.Struct, frozen=True, kw_only=True):
    """What a PC computes with: a device and a model as ``molink simulate`` has them.

    ``pace`` is the file that says how many times as long its steps take now.
    """

    device: str
    model: str
    activations: str
    pace: str

    def slowed(self) -> float:
        """As the file says now."""
        return float(Path(self.pace).read_text(encoding="ascii"))

    def set_pace(self, times: float) -> None:
        """From now on steps take ``times`` as long."""
        new = Path(f"{self.pace}.new")
        new.write_text(str(times), encoding="ascii")
        new.replace(self.pace)

    def roofline(self, layers: int, *, is_last: bool) -> Roofline:
        """How long a stage's steps take while it is cool."""
        device, model = load_device(self.device), load_model(self.model)
        return Roofline(device, model, layers, is_last=is_last)


def read_computer(path: Path) -> Computer:
    """As :func:`msgspec.json.encode` wrote it.

    Raises:
        UsageError: it is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Computer)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} is no PC of an evening: {error}") from error


@dataclass(frozen=True, slots=True)
class EveningStage:
    """Stands for :class:`molink.stage.stage.Stage`; it keeps nothing."""

    computer: Computer
    config: StageConfig
    roofline: Roofline
    is_first: bool
    is_last: bool

    def slowed(self, steps: int) -> float:
        """How many times as long its next step takes."""
        return self.computer.slowed()

    @property
    def wire_dtype(self) -> WeightDType:
        """Of rows on their way."""
        return DTYPE

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights would take."""
        return int(self.roofline.weight_bytes)

    def block_bytes(self, block_size: int) -> int:
        """As small as can be: KV is not what is looked at."""
        return block_size

    def allocate_kv_pool(self, blocks: int, block_size: int) -> None:
        """Nothing is kept."""

    def open_host_pool(self, nbytes: int, stages_per_host: int) -> tuple[int, float]:
        """Nor in host memory: who gives way is computed anew."""
        return 0, 0.0


def load(computer: Computer, start: LoadStage) -> StageEngine:
    """What takes the place of a loaded model."""
    config = ModelFolder.open(Path(start.model_dir), start.layers).config
    first, last = start.layers
    is_last = start.stage == start.stages - 1
    roofline = computer.roofline(last - first, is_last=is_last)
    stage = EveningStage(computer, config, roofline, start.stage == 0, is_last)
    rows = Activations.read(Path(computer.activations), config.hidden_size * 2)

    def executor(_: RequestTable, hand_over: HandOver) -> EmulatedExecutor:
        return EmulatedExecutor(stage, rows, hand_over)

    return StageEngine(stage, measured(roofline.make_profile(), computer.slowed()), executor)


def measured(cool: Profile, times: float) -> Profile:
    """A profile taken while everything takes ``times`` as long."""
    return Profile(
        decode=tuple((rows, seconds * times) for rows, seconds in cool.decode),
        prefill=tuple((rows, seconds * times) for rows, seconds in cool.prefill),
        tile=cool.tile,
        context=cool.context,
        decode_token_s=cool.decode_token_s * times,
        prefill_token_s=cool.prefill_token_s * times,
    )


if __name__ == "__main__":
    code = run(partial(load, read_computer(Path(sys.argv[1]))))
    logging.shutdown()
    exit_process(code)
