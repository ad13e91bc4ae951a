"""The view as lines of text for a screen of some width; plain functions.

Only ASCII and the sixteen colours that every terminal has. A line is never wider than the screen.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from molink.swarm.terms import epoch_text
from molinkd.cli.top.view import (
    KnockView,
    PcView,
    RequestView,
    RingView,
    StageView,
    TransferView,
    View,
)
from molinkd.cli.units import bandwidth, long_time, seconds, size

#: In what order requests are shown.
Order = Literal["oldest", "fastest", "longest"]
ORDERS: tuple[Order, ...] = ("oldest", "fastest", "longest")
_KEYS: dict[Order, Callable[[RequestView], float]] = {
    "oldest": lambda request: -request.age_s,
    "fastest": lambda request: -request.tokens_per_s,
    "longest": lambda request: -(request.prompt + request.generated),
}

#: The narrowest screen that lines are laid out for; on a narrower one they are cut.
NARROWEST = 80
_TITLE = "bold cyan"
_WARNING = "yellow"


def frame(view: View, width: int, order: Order = "oldest") -> list[Text]:
    """All of it."""
    return [*head_lines(view, width), Text(), *body_lines(view, width, order)]


def head_lines(view: View, width: int, *, stale: bool = False) -> list[Text]:
    """Two lines: what is served, and the sums; whether it is now isn't known of a stale view."""
    state = Text("READY", "bold green") if view.ready else Text("NOT READY", "bold red")
    if stale:
        state = Text("UNKNOWN", "bold yellow")
    epochs = ", ".join(f"{ring.id} epoch {epoch_text(ring.epoch)}" for ring in view.rings)
    room = max(20, width - len(f"molink top      {state}  {epochs}"))
    model = _cut(view.model, room // 2)
    first = Text.assemble(
        ("molink top  ", "bold"),
        _cut(view.swarm, room - cell_len(model)),
        "  ",
        model,
        "  ",
        state,
        f"  {epochs}",
    )
    return [_fit(first, width), _fit(Text(_sums(view)), width)]


def _sums(view: View) -> str:
    running = sum(ring.running for ring in view.rings)
    waiting = sum(ring.waiting for ring in view.rings)
    pace = sum(ring.tokens_per_s for ring in view.rings)
    away = f", {view.away} away" if view.away else ""
    parts = [
        f"{view.here} PC{'s' * (view.here != 1)} here{away}",
        f"{running} running, {waiting} waiting",
        f"{pace:.1f} tokens/s",
    ]
    if len(view.rings) == 1:
        parts += _blocks(view.rings[0])
    return "   ".join(parts)


def _blocks(ring: RingView) -> Iterator[str]:
    if ring.blocks:
        cached = f"  cached {ring.cached} %" if ring.cached else ""
        yield f"KV {ring.used_blocks}/{ring.blocks}  K {ring.micro_batches}{cached}"


def _head(ring: RingView) -> Iterator[str]:
    """What the head of a ring does, as far as the sums don't say it."""
    if ring.model:
        yield f"{ring.running} running, {ring.waiting} waiting"
        yield f"{ring.tokens_per_s:.1f} tokens/s"
        yield from _blocks(ring)
    if ring.queues:
        yield f"queues {' '.join(map(str, ring.queues))}"
    if ring.host_blocks or ring.swap_fallbacks:
        anew = f", no room for {ring.swap_fallbacks}" if ring.swap_fallbacks else ""
        yield f"swapped {ring.swapped}, {ring.used_host_blocks}/{ring.host_blocks}{anew}"


def body_lines(view: View, width: int, order: Order = "oldest") -> list[Text]:
    """Everything else, a section after another; what there is none of has no section."""
    lines = [Text(part, _WARNING) for notice in view.notices for part in wrap(notice, width - 1)]
    sections = [
        list(_knocks(view.knocks, width)),
        *(list(_ring(ring, width)) for ring in view.rings if ring.stages),
        list(_others(view.others, width)),
        list(_requests(view, width, order)),
        list(_transfers(view.transfers, width)),
        list(_events(view, width)),
    ]
    for section in sections:
        if section:
            lines += [Text(), *section] if lines else section
    return [_fit(line, width) for line in lines]


# --- sections ------------------------------------------------------------------------------------


def _knocks(knocks: Sequence[KnockView], width: int) -> Iterator[Text]:
    """First of all: somebody waits for it."""
    if not knocks:
        return
    name = max(16, min(44, width - 60))
    yield Text(f"{'WAITING TO JOIN':<{name + 3}} {'code':<12} from", _WARNING)
    for one in knocks:
        line = Text(f"   {_cell(one.name, name)} ")
        line.append(_cell(one.code, 12), "bold")
        line.append(f" {one.address}")
        yield line


def _ring(ring: RingView, width: int) -> Iterator[Text]:
    """What its head does; then for each stage a line, and one for its link to the next one."""
    name, device = _shares(width - 48, 15, 44)
    if ring.model:
        yield Text(f"{ring.model}, {ring.id}{'' if ring.ready else ', not ready'}", "bold")
    yield from map(Text, _packed(list(_head(ring)), width))
    yield Text(
        f"{'RING':<{name + 3}} {'layers':>6} {'device':<{device}} {'memory':>15} "
        f"{'busy':>5} {'bubble':>6} {'step':>7}",
        _TITLE,
    )
    if any(stage.link is not None for stage in ring.stages):
        yield Text(
            f"{'   > link to':<{name + 3}} {'bandwidth':>11} {'latency':>8} "
            f"{'decode wait+sent':>17} {'bulk wait+sent':>17}",
            _TITLE,
        )
    for stage in ring.stages:
        yield _stage(stage, name, device)
        if stage.link is not None:
            yield _link(stage, name)


def _stage(stage: StageView, name: int, device: int) -> Text:
    memory = f"{size(stage.used)}/{size(stage.memory)}" if stage.used else size(stage.memory)
    line = Text(f"{stage.number:>2} ")
    line.append(_cell(stage.pc, name), "bold")
    line.append(f" {stage.layers:>6} {_cell(stage.device, device)} {memory:>15} ")
    if stage.doing:
        line.append(stage.doing, _WARNING)
    else:
        line.append(f"{_share(stage.busy):>5}", "green")
        line.append(f" {_share(stage.bubbles):>6}")
        line.append(f" {seconds(stage.decode_s):>7}")
    return line


def _link(stage: StageView, name: int) -> Text:
    assert stage.link is not None
    link = stage.link.figures
    lanes = [f"{size(lane.queued)} + {size(lane.in_flight)}" for lane in (link.decode, link.bulk)]
    return Text(
        f"   > {_cell(stage.link.to, name - 2)} {bandwidth(link.rate):>11} "
        f"{seconds(link.latency_s):>8} {lanes[0]:>17} {lanes[1]:>17}"
    )


def _others(others: Sequence[PcView], width: int) -> Iterator[Text]:
    if not others:
        return
    name, device = _shares(width - 36, 17, 44)
    yield Text(
        f"{'PCs WITHOUT A STAGE':<{name + 3}} {'state':<8} {'device':<{device}} {'memory':>8}",
        _TITLE,
    )
    for pc in others:
        line = Text("   ")
        line.append(_cell(pc.name, name), "bold")
        line.append(f" {_cell(pc.state, 8)}", "green" if pc.state == "here" else _WARNING)
        line.append(f" {_cell(pc.device, device)} {size(pc.memory) if pc.memory else '':>8}")
        line.append(f" {pc.stages}")
        yield line


def _requests(view: View, width: int, order: Order) -> Iterator[Text]:
    requests = [request for ring in view.rings for request in ring.requests]
    unseen = sum(ring.running + ring.waiting for ring in view.rings) - len(requests)
    if not view.rings:
        return
    if not requests:
        yield Text("REQUESTS  none", _TITLE)
        return
    name = max(22, min(44, width - 54))
    title = f"REQUESTS, {order} first"
    yield Text(
        f"{title:<{name + 3}} {'phase':<13} {'prompt':>8} {'answer':>8} {'tokens/s':>9} {'age':>7}",
        _TITLE,
    )
    for one in sorted(requests, key=_KEYS[order]):
        pace = f"{one.tokens_per_s:.1f}" if one.tokens_per_s else ""
        line = Text(f"   {_cell(one.pc, name)} ")
        line.append(_cell(one.phase, 13), "green" if one.state == "decode" else _WARNING)
        line.append(f" {one.prompt:>8} {one.generated:>8} {pace:>9} {long_time(one.age_s):>7}")
        yield line
    if unseen > 0:
        yield Text(f"   and {unseen} more")


def _transfers(transfers: Sequence[TransferView], width: int) -> Iterator[Text]:
    if not transfers:
        return
    name = max(17, min(44, width - 59))
    yield Text(
        f"{'TRANSFERS to':<{name + 3}} {'what':<17} {'here/all':>17} {'rate':>10} {'left':>7}",
        _TITLE,
    )
    for one in transfers:
        rate = f"{size(one.rate)}/s" if one.rate else ""
        left = "" if one.left_s is None else long_time(one.left_s)
        yield Text(
            f"   {_cell(one.pc, name)} {_cell(one.what, 17)} "
            f"{f'{size(one.done)}/{size(one.total)}':>17} {rate:>10} {left:>7}"
        )


def _events(view: View, width: int) -> Iterator[Text]:
    """The newest first."""
    if not view.events:
        return
    yield Text("EVENTS", _TITLE)
    for event in view.events:
        ago = "" if event.ago is None else f"{long_time(event.ago)} ago"
        first, *rest = wrap(event.text, width - 17)
        yield Text(f"{ago:>13}  {first}")
        for part in rest:
            yield Text(f"{'':>13}  {part}")


def wrap(text: str, width: int) -> list[str]:
    """A text as lines of at most so many columns, 20 at least; by words where none is wide."""
    width = max(20, width)
    if cell_len(text) > len(text):
        return chop_cells(text, width)
    return textwrap.wrap(text, width) or [""]


def _packed(parts: Sequence[str], width: int) -> Iterator[str]:
    """As few lines of whole parts as there can be."""
    line = ""
    for part in parts:
        if line and len(line) + 3 + len(part) > width:
            yield line
            line = part
        else:
            line = f"{line}   {part}" if line else part
    if line:
        yield line


# --- cells ---------------------------------------------------------------------------------------


def _shares(room: int, least: int, most: int) -> tuple[int, int]:
    """What a name and a device may take of ``room`` columns."""
    name = max(least, min(most, room // 2))
    return name, max(8, min(most, room - name))


def _cut(text: str, width: int) -> str:
    """A text of at most so many columns."""
    return text if cell_len(text) <= width else _cell(text, width)


def _cell(text: str, width: int) -> str:
    """A text of exactly so many columns; ``~`` ends one that was cut."""
    fitted = set_cell_size(text, width)
    if fitted.rstrip() != text.rstrip():
        return set_cell_size(fitted, width - 1) + "~"
    return fitted


def _fit(line: Text, width: int) -> Text:
    line.truncate(max(1, width), overflow="crop")
    return line


def _share(percent: int | None) -> str:
    return "?" if percent is None else f"{percent} %"
