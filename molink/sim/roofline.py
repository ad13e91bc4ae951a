"""Roofline model of a stage's step times.

A step takes the longer of reading all weights once and computing every row. Attention adds to that:
a decode row reads the KV of all previous tokens, and a prefill row computes with all previous
tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from molink.facts.footprint import count_pool_blocks
from molink.facts.profile import Profile
from molink.sim.profiles import DeviceProfile, ModelProfile

#: Numbers of rows in a profile, the same that stages measure.
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_PREFILL_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_CONTEXT = 128
#: Share of a device's memory for weights, KV blocks and activations.
_MEMORY_SHARE = 0.9
_ACTIVATIONS_GB = 0.75


class StepRows(msgspec.Struct, frozen=True):
    """Numbers of rows of a step.

    ``decode`` rows attend to ``decode_context`` tokens in total, ``prefill`` rows to
    ``prefill_context`` tokens in total; ``sampled`` rows need logits.
    """

    decode: int = 0
    decode_context: int = 0
    prefill: int = 0
    prefill_context: int = 0
    sampled: int = 0


@dataclass(frozen=True, slots=True)
class HostShare:
    """The share of a stage's routed experts in host memory, and the CPU that computes them."""

    share: float
    cpu: DeviceProfile

    @property
    def read_rate(self) -> float:
        """Bytes/s."""
        return self.cpu.memory_gbs * 1e9 * self.cpu.memory_efficiency

    @property
    def compute_rate(self) -> float:
        """Operations/s."""
        return self.cpu.tflops * 1e12 * self.cpu.compute_efficiency


class Roofline:
    """A stage: ``layers`` layers of ``model`` on ``device``, with logits if ``is_last``.

    A last stage with an MTP layer runs that layer in each step and reads the head twice. The CPU of
    ``host`` reads and computes its experts after those of the device.
    """

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelProfile,
        layers: int,
        *,
        is_last: bool,
        host: HostShare | None = None,
    ) -> None:
        self._tile = device.tile
        self.layers = layers
        self.interleaves = device.interleaves
        self._model = model
        memory = device.memory_gbs * 1e9 * device.memory_efficiency
        compute = device.tflops * 1e12 * device.compute_efficiency
        behind = model.mtp_layers if is_last else 0
        self._all_layers = layers + behind
        weights = self._all_layers * model.layer_parameters
        logits = model.vocabulary * model.hidden if is_last else 0
        kinds = (
            (model.block_bytes, model.bytes_per_parameter),
            (model.head_block_bytes, model.head_bytes or model.bytes_per_parameter),
        )
        weight, end = (
            in_blocks if device.keeps_blocks and in_blocks else usual for in_blocks, usual in kinds
        )
        # An MTP layer keeps all its experts on the device.
        self._away = away = 0.0 if host is None else host.share * layers / self._all_layers
        #: Bytes of experts in host memory.
        self.host_bytes = away * model.expert_share * weights * weight
        # The embedding is as large as the output head.
        self.weight_bytes = weights * weight + (1 + behind) * logits * end - self.host_bytes
        logits *= 1 + behind
        met = model.expert_share * model.chosen_share
        # The host's share of a row's operations, its seconds to read its experts, and its seconds
        # per row.
        rows_away = away * met / (1 - model.expert_share + met)
        self._host_read_s = self._host_row_s = 0.0
        if host is not None:
            self._host_read_s = self.host_bytes / host.read_rate
            self._host_row_s = 2 * weights * rows_away / host.compute_rate
        self._step_s = device.step_ms / 1000
        self._read_s = weights * weight / memory
        self._row_s = 2 * weights * (1 - rows_away) / compute
        self._read_logits_s = logits * end / memory
        self._row_logits_s = 2 * logits / compute
        #: Seconds per previous token of a decode row, and of a prefill row.
        attended = self._all_layers * model.attention_share
        self._decode_token_s = attended * model.kv_bytes / memory
        self._prefill_token_s = 4 * attended * model.heads * model.head_size / compute
        #: Seconds to read and write the recurrent states of a decode row.
        self._state_s = 2 * layers * model.state_bytes / memory

    def step_s(self, rows: StepRows) -> float:
        """Return the seconds of one fused step."""
        count = rows.decode + rows.prefill
        padded = count if count <= self._tile else -(-count // self._tile) * self._tile
        model = self._model
        chosen = 1.0 - (1.0 - model.chosen_share) ** count
        read_s = self._read_s * (model.read_share(count) - self._away * model.expert_share * chosen)
        seconds = self._step_s + max(read_s, self._row_s * padded)
        seconds += max(self._host_read_s * chosen, self._host_row_s * count)
        if rows.sampled:
            seconds += max(self._read_logits_s, self._row_logits_s * rows.sampled)
        seconds += self._decode_token_s * rows.decode_context + self._state_s * rows.decode
        return seconds + self._prefill_token_s * rows.prefill_context

    def make_profile(self) -> Profile:
        """Return ``T_d`` and ``T_p`` as the stage would measure them, in seconds."""
        return Profile(
            decode=tuple((rows, self._decode_s(rows)) for rows in _DECODE_ROWS),
            prefill=tuple((rows, self._prefill_s(rows)) for rows in _PREFILL_ROWS),
            tile=self._tile,
            context=_CONTEXT,
            decode_token_s=self._decode_token_s,
            prefill_token_s=self._prefill_token_s,
            interleaves=self.interleaves,
        )

    def _decode_s(self, rows: int) -> float:
        return self.step_s(StepRows(decode=rows, decode_context=rows * _CONTEXT, sampled=rows))

    def _prefill_s(self, rows: int) -> float:
        within = rows * (rows + 1) // 2
        return self.step_s(StepRows(prefill=rows, prefill_context=within, sampled=1))

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values, with the average share of attention layers."""
        model = self._model
        return math.ceil(self._all_layers * model.attention_share * model.kv_bytes)

    def kv_tokens(self, device: DeviceProfile) -> int:
        """Return how many tokens' KV fits beside the weights; 0 if the weights don't fit."""
        room = max(0, int(memory_for_stages(device) - self.weight_bytes))
        states = math.ceil(self.layers * self._model.slot_bytes)
        return count_pool_blocks(room, self.kv_token_bytes, 1, states)


def memory_for_stages(device: DeviceProfile) -> float:
    """Return the bytes of a device that are available for weights and KV."""
    return _MEMORY_SHARE * device.memory_gb * 1e9 - _ACTIVATIONS_GB * 1e9


def split_layers(layers: int, stages: int) -> list[int]:
    """Split layers as evenly as possible; the first stages get the remainder."""
    return [layers // stages + (index < layers % stages) for index in range(stages)]


def stage_rooflines(
    devices: Sequence[DeviceProfile],
    model: ModelProfile,
    layers: Sequence[int],
    hosts: Sequence[HostShare | None] = (),
) -> Sequence[Roofline]:
    """Return rooflines of a ring's stages; ``hosts`` has each stage's experts in host memory."""
    last, beside = len(devices) - 1, hosts or [None] * len(devices)
    return [
        Roofline(device, model, count, is_last=index == last, host=host)
        for index, (device, count, host) in enumerate(zip(devices, layers, beside, strict=True))
    ]
