"""The requests of a run, from sizes or from traces of real services.

Two trace formats are read; the first character tells them apart:

- Azure's CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens`` with dates such as
  ``2023-11-16 18:15:46.6805900``
- Mooncake's JSONL: ``timestamp`` in milliseconds, ``input_length``, ``output_length``, and
  ``hash_ids``, one for each block of 512 prompt tokens: equal leading ids mean a shared prefix
"""

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from molink.errors import UsageError

AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
#: Tokens of a hashed prompt block in Mooncake's traces; the last block may be shorter.
HASH_BLOCK_TOKENS = 512
MAX_HASH_IDS = 2**15
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**24)]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request, ``arrival_s`` seconds after the trace's first. Sizes are in tokens.

    ``hash_ids`` has an id for each block of :data:`HASH_BLOCK_TOKENS` prompt tokens, if known.
    Equal leading ids mean a shared prefix.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _AzureRow(msgspec.Struct, frozen=True):
    timestamp: str
    context: Tokens
    generated: Tokens


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...],
        msgspec.Meta(max_length=MAX_HASH_IDS),
    ] = ()


def read_trace(path: Path) -> list[TraceRow]:
    """Read all requests of a trace file in order of arrival.

    Raises:
        UsageError: the file can't be read, is empty, or has an invalid row. The message names the
            row; the file's first line is row 1.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = file.read().splitlines()
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"can't read the trace {path}: {why}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"can't read the trace {path}: it is not text") from error
    parse = _parse_mooncake if lines and lines[0].lstrip().startswith("{") else _parse_azure
    rows = sorted(parse(path, lines), key=lambda row: row.arrival_s)
    if not rows:
        raise UsageError(f"the trace {path} has no requests")
    return [
        TraceRow(r.arrival_s - rows[0].arrival_s, r.input_tokens, r.output_tokens, r.hash_ids)
        for r in rows
    ]


def _parse_azure(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    for number, fields in enumerate(csv.reader(lines), start=1):
        if number == 1:
            if fields != AZURE_HEADER:
                raise UsageError(
                    f"{path}, row 1: expected the header {','.join(AZURE_HEADER)} or a JSON object"
                )
            continue
        if not fields:
            continue
        try:
            if len(fields) != len(AZURE_HEADER):
                raise ValueError(f"{len(fields)} fields instead of {len(AZURE_HEADER)}")
            row = msgspec.convert(
                dict(zip(("timestamp", "context", "generated"), fields, strict=True)),
                _AzureRow,
                strict=False,
            )
            moment = datetime.fromisoformat(row.timestamp)
        except ValueError as error:
            raise _bad_row(path, number, error) from error
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        yield TraceRow(seconds, row.context, row.generated)


def _parse_mooncake(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except ValueError as error:
            raise _bad_row(path, number, error) from error
        yield TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _bad_row(path: Path, number: int, error: Exception) -> UsageError:
    return UsageError(f"{path}, row {number}: {error}")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that arrives ``arrival_s`` seconds after the start. Sizes are in tokens.

    ``hash_ids`` are those of :class:`TraceRow`. A simulated client may set ``max_tokens`` above
    ``output_tokens``, so that the scheduler does not know the answer's length; with 0, it requests
    ``output_tokens``.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    max_tokens: int = 0

    @property
    def last_position(self) -> int:
        """The position of the last token."""
        return self.input_tokens + self.output_tokens - 1


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return ``count`` ascending arrival times in seconds from the start; the first is 0.

    Gaps are exponential with mean ``1 / rate`` (requests/s); ``inf`` puts all at 0. Equal seeds
    give equal times.

    Raises:
        UsageError: ``rate`` is not positive, or ``count`` is below 1.
    """
    if math.isnan(rate) or rate <= 0:
        raise UsageError(f"--rate must be a positive number of requests/s or inf, not {rate:g}")
    if count < 1:
        raise UsageError(f"--requests must be at least 1, not {count}")
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(rate))
    return times


def plan_sizes(
    input_tokens: int, output_tokens: int, rate: float, count: int, seed: int
) -> list[PlannedRequest]:
    """Plan ``count`` requests of one size with Poisson arrivals (``inf``: all at once)."""
    if input_tokens < 1 or output_tokens < 1:
        raise UsageError("--input-tokens and --output-tokens must be at least 1")
    arrivals = poisson_arrivals(rate, count, seed)
    return [
        PlannedRequest(index, at, input_tokens, output_tokens) for index, at in enumerate(arrivals)
    ]


def plan_trace(
    rows: Sequence[TraceRow], rate: float | None, count: int, seed: int
) -> list[PlannedRequest]:
    """Plan the first ``count`` requests of a trace, with its sizes and in its order.

    They arrive at the trace's times, or as a Poisson process if ``rate`` is given.
    """
    chosen = rows[:count]
    times = (
        [row.arrival_s - chosen[0].arrival_s for row in chosen]
        if rate is None
        else poisson_arrivals(rate, len(chosen), seed)
    )
    return [
        PlannedRequest(index, at, row.input_tokens, row.output_tokens)
        for index, (at, row) in enumerate(zip(times, chosen, strict=True))
    ]
