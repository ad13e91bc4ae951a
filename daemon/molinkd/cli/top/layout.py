"""Lays out the view as lines of text for a screen width; plain functions.

In English it uses only ASCII, and 16 colours. A line is never wider than the screen.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from molink.swarm.election.terms import epoch_text
from molinkd.cli.plain_table import pad_cell, wrap_text
from molinkd.cli.top.view import (
    PairingView,
    PcView,
    RequestView,
    RingView,
    StageView,
    SwarmView,
    TransferView,
)
from molinkd.cli.translation import tr, tr_count
from molinkd.cli.units import (
    format_bandwidth,
    format_duration,
    format_seconds,
    format_size,
    format_usage,
)

#: Order of requests.
SortOrder = Literal["oldest", "fastest", "longest"]
SORT_ORDERS: tuple[SortOrder, ...] = ("oldest", "fastest", "longest")
_SORT_KEYS: dict[SortOrder, Callable[[RequestView], float]] = {
    "oldest": lambda request: -request.age_s,
    "fastest": lambda request: -request.tokens_per_s,
    "longest": lambda request: -(request.prompt + request.generated),
}

#: Minimum layout width; narrower screens crop the lines.
MIN_WIDTH = 80
_TITLE_STYLE = "bold cyan"
_WARNING_STYLE = "yellow"


def screen_lines(view: SwarmView, width: int, order: SortOrder = "oldest") -> list[Text]:
    """Return the whole screen."""
    return [*header_lines(view, width), Text(), *body_lines(view, width, order)]


def header_lines(view: SwarmView, width: int, *, stale: bool = False) -> list[Text]:
    """Return the two header lines: models and totals; the state of a stale view is unknown."""
    state = Text(tr("READY"), "bold green") if view.ready else Text(tr("NOT READY"), "bold red")
    if stale:
        state = Text(tr("UNKNOWN"), "bold yellow")
    epochs = ", ".join(
        tr("{ring} epoch {epoch}", ring=ring.id, epoch=epoch_text(ring.epoch))
        for ring in view.rings
    )
    room = max(20, width - cell_len(f"molink top      {state}  {epochs}"))
    model = _truncate_text(view.model, room // 2)
    first = Text.assemble(
        ("molink top  ", "bold"),
        _truncate_text(view.swarm, room - cell_len(model)),
        "  ",
        model,
        "  ",
        state,
        f"  {epochs}",
    )
    return [_crop_line(first, width), _crop_line(Text(_totals_text(view, width)), width)]


def _totals_text(view: SwarmView, width: int) -> str:
    """Return the totals; what doesn't fit ``width`` columns is dropped from the end."""
    running = sum(ring.running for ring in view.rings)
    waiting = sum(ring.waiting for ring in view.rings)
    rate = sum(ring.tokens_per_s for ring in view.rings)
    connected = tr_count("{count} PC connected", "{count} PCs connected", view.online)
    if view.offline:
        connected += tr(", {count} offline", count=view.offline)
    parts = [connected, _queue_text(running, waiting), _rate_text(rate)]
    if len(view.rings) == 1:
        parts += _kv_parts(view.rings[0])
    text = "   ".join(parts)
    while cell_len(text) > width and parts:
        text = "  ".join(parts)
        parts.pop()
    return text


def _queue_text(running: int, waiting: int) -> str:
    return tr("{running} running, {waiting} waiting", running=running, waiting=waiting)


def _rate_text(rate: float) -> str:
    return tr("{rate} tokens/s", rate=f"{rate:.1f}")


def _kv_parts(ring: RingView) -> Iterator[str]:
    if ring.kv_reserved:
        yield f"KV {format_usage((ring.kv_used,), ring.kv_reserved)}"
    if ring.micro_batches:
        yield f"K {ring.micro_batches}"
    if ring.cached:
        yield tr("cached {percent} %", percent=ring.cached)


def _scheduler_parts(ring: RingView) -> Iterator[str]:
    """Yield the scheduler's state that the totals lack."""
    if ring.model:
        yield _queue_text(ring.running, ring.waiting)
        yield _rate_text(ring.tokens_per_s)
        yield from _kv_parts(ring)
    if ring.queues:
        yield tr("queues {lengths}", lengths=" ".join(map(str, ring.queues)))
    if ring.host_blocks or ring.swap_fallbacks:
        blocks = f"{ring.used_host_blocks}/{ring.host_blocks}"
        text = tr("swapped {count}, {blocks}", count=ring.swapped, blocks=blocks)
        if ring.swap_fallbacks:
            text += tr(", {count} recomputed", count=ring.swap_fallbacks)
        yield text


def body_lines(view: SwarmView, width: int, order: SortOrder = "oldest") -> list[Text]:
    """Return all sections; empty ones are omitted."""
    lines = [
        Text(part, _WARNING_STYLE)
        for notice in view.notices
        for part in wrap_text(notice, width - 1)
    ]
    sections = [
        list(_pairing_lines(view.pairings, width)),
        *(list(_ring_lines(ring, width)) for ring in view.rings if ring.stages),
        list(_pc_lines(view.others, width)),
        list(_request_lines(view, width, order)),
        list(_transfer_lines(view.transfers, width)),
        list(_event_lines(view, width)),
    ]
    for section in sections:
        if section:
            lines += [Text(), *section] if lines else section
    return [_crop_line(line, width) for line in lines]


# --- sections ------------------------------------------------------------------------------------


def _pairing_lines(pairings: Sequence[PairingView], width: int) -> Iterator[Text]:
    """Yield waiting PCs, first because they need a decision."""
    if not pairings:
        return
    name = max(16, min(44, width - 60))
    columns = (tr("WAITING TO JOIN"), name + 3), (tr("code"), 12), (tr("from"), 8)
    yield Text(_format_cells(*columns), _WARNING_STYLE)
    for one in pairings:
        line = Text(f"   {_fit_cell(one.name, name)} ")
        line.append(_fit_cell(one.code, 12), "bold")
        line.append(f" {one.address}")
        yield line


def _ring_lines(ring: RingView, width: int) -> Iterator[Text]:
    """Yield the scheduler's state, then each stage and its link to the next one."""
    name, device = _column_widths(width - 48, 15, 44)
    if ring.model:
        state = "" if ring.ready else f", {tr('not ready')}"
        yield Text(f"{ring.model}, {ring.id}{state}", "bold")
    yield from map(Text, _pack_lines(list(_scheduler_parts(ring)), width))
    columns = (tr("RING"), name + 3), (tr("layers"), -6), (tr("device"), device)
    load = (tr("weights+KV/all"), -15), (tr("busy"), -5), (tr("bubble"), -6), (tr("step"), -7)
    yield Text(_format_cells(*columns, *load), _TITLE_STYLE)
    if any(stage.link is not None for stage in ring.stages):
        link = (f"   > {tr('link to')}", name + 3), (tr("bandwidth"), -11), (tr("latency"), -8)
        channels = (tr("decode wait+sent"), -17), (tr("bulk wait+sent"), -17)
        yield Text(_format_cells(*link, *channels), _TITLE_STYLE)
    for stage in ring.stages:
        yield _stage_line(stage, name, device)
        if stage.link is not None:
            yield _link_line(stage, name)


def _stage_line(stage: StageView, name: int, device: int) -> Text:
    memory = (
        format_usage((stage.weights, stage.kv), stage.memory)
        if stage.weights or stage.kv
        else format_size(stage.memory)
    )
    line = Text(f"{stage.number:>2} ")
    line.append(_fit_cell(stage.pc, name), "bold")
    line.append(f" {stage.layers:>6} {_fit_cell(stage.device, device)} {memory:>15} ")
    if stage.doing:
        line.append(stage.doing, _WARNING_STYLE)
    else:
        line.append(f"{_percent_text(stage.busy):>5}", "green")
        line.append(f" {_percent_text(stage.bubbles):>6}")
        line.append(f" {format_seconds(stage.decode_s):>7}")
    return line


def _link_line(stage: StageView, name: int) -> Text:
    assert stage.link is not None
    link = stage.link.figures
    channels = [
        f"{format_size(channel.queued)} + {format_size(channel.in_flight)}"
        for channel in (link.decode, link.bulk)
    ]
    return Text(
        f"   > {_fit_cell(stage.link.target, name - 2)} {format_bandwidth(link.rate):>11} "
        f"{format_seconds(link.latency_s):>8} {channels[0]:>17} {channels[1]:>17}"
    )


def _pc_lines(others: Sequence[PcView], width: int) -> Iterator[Text]:
    if not others:
        return
    name, device = _column_widths(width - 36, 17, 44)
    columns = (tr("PCs WITHOUT A STAGE"), name + 3), (tr("state"), 8), (tr("device"), device)
    yield Text(_format_cells(*columns, (tr("memory"), -8)), _TITLE_STYLE)
    for pc in others:
        line = Text("   ")
        line.append(_fit_cell(pc.name, name), "bold")
        line.append(
            f" {_fit_cell(pc.state, 8)}", "green" if pc.state == "online" else _WARNING_STYLE
        )
        line.append(
            f" {_fit_cell(pc.device, device)} {format_size(pc.memory) if pc.memory else '':>8}"
        )
        line.append(f" {pc.stages}")
        yield line


def _request_lines(view: SwarmView, width: int, order: SortOrder) -> Iterator[Text]:
    requests = [request for ring in view.rings for request in ring.requests]
    unseen = sum(ring.running + ring.waiting for ring in view.rings) - len(requests)
    if not view.rings:
        return
    if not requests:
        yield Text(tr("REQUESTS  none"), _TITLE_STYLE)
        return
    name = max(22, min(44, width - 54))
    titles: dict[SortOrder, str] = {
        "oldest": tr("REQUESTS, oldest first"),
        "fastest": tr("REQUESTS, fastest first"),
        "longest": tr("REQUESTS, longest first"),
    }
    columns = (titles[order], name + 3), (tr("phase"), 13), (tr("prompt"), -8), (tr("answer"), -8)
    yield Text(_format_cells(*columns, (tr("tokens/s"), -9), (tr("age"), -7)), _TITLE_STYLE)
    for one in sorted(requests, key=_SORT_KEYS[order]):
        rate = f"{one.tokens_per_s:.1f}" if one.tokens_per_s else ""
        line = Text(f"   {_fit_cell(one.pc, name)} ")
        line.append(_fit_cell(one.phase, 13), "green" if one.state == "decode" else _WARNING_STYLE)
        line.append(
            f" {one.prompt:>8} {one.generated:>8} {rate:>9} {format_duration(one.age_s):>7}"
        )
        yield line
    if unseen > 0:
        yield Text(f"   {tr('and {count} more', count=unseen)}")


def _transfer_lines(transfers: Sequence[TransferView], width: int) -> Iterator[Text]:
    if not transfers:
        return
    name = max(17, min(44, width - 59))
    columns = (tr("TRANSFERS to"), name + 3), (tr("what"), 17), (tr("done/all"), -17)
    yield Text(_format_cells(*columns, (tr("rate"), -10), (tr("left"), -7)), _TITLE_STYLE)
    for one in transfers:
        rate = f"{format_size(one.rate)}/s" if one.rate else ""
        left = "" if one.left_s is None else format_duration(one.left_s)
        yield Text(
            f"   {_fit_cell(one.pc, name)} {_fit_cell(one.what, 17)} "
            f"{f'{format_size(one.done)}/{format_size(one.total)}':>17} {rate:>10} {left:>7}"
        )


def _event_lines(view: SwarmView, width: int) -> Iterator[Text]:
    """Yield events, newest first."""
    if not view.events:
        return
    yield Text(tr("EVENTS"), _TITLE_STYLE)
    for event in view.events:
        ago = ""
        if event.age_s is not None:
            ago = tr("{time} ago", time=format_duration(event.age_s))
        first, *rest = wrap_text(event.text, width - 17)
        yield Text(f"{pad_cell(ago, -13)}  {first}")
        for part in rest:
            yield Text(f"{'':>13}  {part}")


def _pack_lines(parts: Sequence[str], width: int) -> Iterator[str]:
    """Pack parts into as few lines as possible."""
    line = ""
    for part in parts:
        if line and cell_len(line) + 3 + cell_len(part) > width:
            yield line
            line = part
        else:
            line = f"{line}   {part}" if line else part
    if line:
        yield line


# --- cells ---------------------------------------------------------------------------------------


def _column_widths(room: int, least: int, most: int) -> tuple[int, int]:
    """Divide ``room`` columns between name and device."""
    name = max(least, min(most, room // 2))
    return name, max(8, min(most, room - name))


def _format_cells(*columns: tuple[str, int]) -> str:
    """Put texts into columns of given widths, negative ones on the right; cut what is longer."""
    return " ".join(
        pad_cell(_truncate_text(text, abs(width)), width) for text, width in columns
    ).rstrip()


def _truncate_text(text: str, width: int) -> str:
    """Truncate a text to ``width`` columns."""
    return text if cell_len(text) <= width else _fit_cell(text, width)


def _fit_cell(text: str, width: int) -> str:
    """Pad or truncate a text to exactly ``width`` columns; ``~`` marks truncation."""
    fitted = set_cell_size(text, width)
    if fitted.rstrip() != text.rstrip():
        return set_cell_size(fitted, width - 1) + "~"
    return fitted


def _crop_line(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="crop")
    return line


def _percent_text(percent: int | None) -> str:
    return "?" if percent is None else f"{percent} %"
