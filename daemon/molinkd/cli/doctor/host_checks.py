"""Checks the state folder, disk, sleep, clock and versions."""

from molinkd.cli.doctor.facts import Finding, HostFacts, SwarmFacts
from molinkd.cli.translation import tr

#: Free disk space in bytes: below the first nothing works, below the second few models fit.
_NO_ROOM, _LITTLE_ROOM = 500 << 20, 10 << 30
#: Clock differences in seconds: above the first, log times mislead; above the second, tokens and
#: certificates seem expired or not yet valid.
_AMISS, _WRONG = 5.0, 300.0
#: molink did not exist before this year.
_FIRST_YEAR = 2025


def check_host(facts: HostFacts, swarm: SwarmFacts | None) -> list[Finding]:
    """Check this PC; one finding each."""
    return [
        _check_state_folder(facts),
        _check_disk(facts),
        _check_sleep(facts),
        _check_clock(facts, swarm),
        _check_version(facts, swarm),
    ]


def _check_state_folder(facts: HostFacts) -> Finding:
    windows = facts.system == "win32"
    if facts.write_error:
        command = f'icacls "{facts.home}" /grant "{facts.user}:(OI)(CI)F"'
        if not windows:
            command = f'sudo chown -R "{facts.user}" "{facts.home}"'
        text = tr(
            "the state folder {folder} is not writable: {error}",
            folder=facts.home,
            error=facts.write_error,
        )
        return Finding("state", "problem", text, (command, "molink doctor --home FOLDER"))
    if facts.options_error:
        return Finding(
            "state",
            "problem",
            tr(
                "molink can't start: the saved options can't be read ({error})",
                error=facts.options_error,
            ),
            ("molink doctor --fix",),
            "set-aside-options",
        )
    if facts.is_open_to_others:
        return Finding(
            "state",
            "warning",
            tr(
                "other users of this PC can read {folder}, which holds its keys",
                folder=facts.home,
            ),
            (f'chmod 700 "{facts.home}"',),
            "restrict-folder",
        )
    return Finding("state", "ok", tr("{folder} is writable", folder=facts.home))


def _check_disk(facts: HostFacts) -> Finding:
    gigabytes = f"{facts.free_bytes / 1e9:.1f}"
    room = tr("{free} GB free on the disk of the state folder", free=gigabytes)
    if facts.model_bytes:
        room += tr("; models use {used} GB", used=f"{facts.model_bytes / 1e9:.1f}")
    commands = ("molink list", "molink rm NAME") if facts.model_bytes else ()
    if facts.free_bytes < _NO_ROOM:
        text = tr("{room}: not enough for models or the swarm's state", room=room)
        return Finding("disk", "problem", text, commands)
    if facts.free_bytes < _LITTLE_ROOM:
        return Finding("disk", "warning", tr("{room}: few models fit", room=room), commands)
    return Finding("disk", "ok", room)


def _check_sleep(facts: HostFacts) -> Finding:
    if facts.on_battery:
        text = tr(
            "this PC runs on battery: it may slow down, or sleep and interrupt the swarm. Plug it "
            "in"
        )
        return Finding("sleep", "warning", text)
    if not facts.keep_awake:
        text = tr("`keep_awake` is off: this PC may sleep while it holds layers")
        return Finding("sleep", "ok", text)
    if not facts.has_inhibitor:
        return Finding(
            "sleep",
            "warning",
            tr("molink can't prevent sleep while this PC holds layers (no systemd-inhibit)"),
            ("sudo systemctl mask sleep.target suspend.target",),
        )
    return Finding("sleep", "ok", tr("this PC stays awake while it holds layers"))


def _check_clock(facts: HostFacts, swarm: SwarmFacts | None) -> Finding:
    commands = ("sudo timedatectl set-ntp true",)
    if facts.system == "win32":
        commands = (f"w32tm /resync  # {tr('as administrator')}",)
    if facts.year < _FIRST_YEAR:
        text = tr(
            "this PC's clock shows the year {year}: tokens and certificates will seem invalid",
            year=facts.year,
        )
        return Finding("clock", "problem", text, commands)
    if swarm is None or swarm.clock_offset_s is None:
        return Finding("clock", "ok", tr("no other clock to compare with"))
    leader = swarm.peer_name(swarm.leader)
    if swarm.leader == swarm.own_id:
        text = tr("this PC leads the swarm: its clock is the reference")
        return Finding("clock", "ok", text)
    amiss = abs(swarm.clock_offset_s) - swarm.clock_error_s
    apart = f"{abs(swarm.clock_offset_s):.1f}"
    text = tr("this PC's clock is {seconds} s behind that of {pc}", seconds=apart, pc=leader)
    if swarm.clock_offset_s > 0:
        text = tr("this PC's clock is {seconds} s ahead of that of {pc}", seconds=apart, pc=leader)
    if amiss > _WRONG:
        worse = tr("{clock}: tokens may seem expired or never expire", clock=text)
        return Finding("clock", "problem", worse, commands)
    if amiss > _AMISS:
        worse = tr("{clock}: log times will differ", clock=text)
        return Finding("clock", "warning", worse, commands)
    return Finding("clock", "ok", tr("within {seconds} s of {pc}", seconds=apart, pc=leader))


def _check_version(facts: HostFacts, swarm: SwarmFacts | None) -> Finding:
    mine = f"molink {facts.version}"
    if swarm is None:
        return Finding("version", "ok", mine)
    running = next((one.version for one in swarm.peers if one.id == swarm.own_id), "")
    if running and running != facts.version:
        text = tr(
            "{mine} is installed, but the running daemon is {running}", mine=mine, running=running
        )
        return Finding("version", "warning", text, ("molink down", "molink up  # or: molink join"))
    other = [one for one in swarm.others if one.version and one.version != facts.version]
    if other:
        clone = tr("in a clone: git pull, its installer, molink down, molink up")
        names = ", ".join(
            tr("{pc} has {version}", pc=one.name, version=one.version) for one in other
        )
        return Finding(
            "version",
            "warning",
            tr(
                "this PC has {mine}, but {others}: update all PCs to the same version, one by one",
                mine=mine,
                others=names,
            ),
            (f"molink update  # {clone}",),
        )
    if swarm.others:
        count = len(swarm.peers)
        mine = tr("{mine}, like all {count} PCs of the swarm", mine=mine, count=count)
    return Finding("version", "ok", mine)
