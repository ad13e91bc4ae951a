"""Checks the state folder, disk, sleep, clock and versions."""

from molinkd.cli.doctor.facts import Finding, HostFacts, SwarmFacts

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
        text = f"the state folder {facts.home} is not writable: {facts.write_error}"
        return Finding("state", "problem", text, (command, "molink doctor --home FOLDER"))
    if facts.options_error:
        return Finding(
            "state",
            "problem",
            f"molink can't start: the saved options can't be read ({facts.options_error})",
            ("molink doctor --fix",),
            "set-aside-options",
        )
    if facts.is_open_to_others:
        return Finding(
            "state",
            "warning",
            f"other users of this PC can read {facts.home}, which holds its keys",
            (f'chmod 700 "{facts.home}"',),
            "restrict-folder",
        )
    return Finding("state", "ok", f"{facts.home} is writable")


def _check_disk(facts: HostFacts) -> Finding:
    free = f"{facts.free_bytes / 1e9:.1f} GB free on the disk of the state folder"
    taken = f"; models use {facts.model_bytes / 1e9:.1f} GB" if facts.model_bytes else ""
    commands = ("molink list", "molink rm NAME") if facts.model_bytes else ()
    if facts.free_bytes < _NO_ROOM:
        text = f"{free}{taken}: not enough for models or the swarm's state"
        return Finding("disk", "problem", text, commands)
    if facts.free_bytes < _LITTLE_ROOM:
        return Finding("disk", "warning", f"{free}{taken}: few models fit", commands)
    return Finding("disk", "ok", f"{free}{taken}")


def _check_sleep(facts: HostFacts) -> Finding:
    if facts.on_battery:
        text = "this PC runs on battery: it may slow down, or sleep and interrupt the swarm"
        return Finding("sleep", "warning", f"{text}. Plug it in")
    if not facts.keep_awake:
        text = "`keep_awake` is off: this PC may sleep while it holds layers"
        return Finding("sleep", "ok", text)
    if not facts.has_inhibitor:
        return Finding(
            "sleep",
            "warning",
            "molink can't prevent sleep while this PC holds layers (no systemd-inhibit)",
            ("sudo systemctl mask sleep.target suspend.target",),
        )
    return Finding("sleep", "ok", "this PC stays awake while it holds layers")


def _check_clock(facts: HostFacts, swarm: SwarmFacts | None) -> Finding:
    commands = ("sudo timedatectl set-ntp true",)
    if facts.system == "win32":
        commands = ("w32tm /resync  # as administrator",)
    if facts.year < _FIRST_YEAR:
        text = (
            f"this PC's clock shows the year {facts.year}: tokens and certificates will seem "
            "invalid"
        )
        return Finding("clock", "problem", text, commands)
    if swarm is None or swarm.clock_offset_s is None:
        return Finding("clock", "ok", "no other clock to compare with")
    leader = swarm.peer_name(swarm.leader)
    if swarm.leader == swarm.own_id:
        return Finding("clock", "ok", "this PC leads the swarm: its clock is the reference")
    amiss = abs(swarm.clock_offset_s) - swarm.clock_error_s
    way = "ahead of" if swarm.clock_offset_s > 0 else "behind"
    text = f"this PC's clock is {abs(swarm.clock_offset_s):.1f} s {way} that of {leader}"
    if amiss > _WRONG:
        worse = f"{text}: tokens may seem expired or never expire"
        return Finding("clock", "problem", worse, commands)
    if amiss > _AMISS:
        return Finding("clock", "warning", f"{text}: log times will differ", commands)
    return Finding("clock", "ok", f"within {abs(swarm.clock_offset_s):.1f} s of {leader}")


def _check_version(facts: HostFacts, swarm: SwarmFacts | None) -> Finding:
    mine = f"molink {facts.version}"
    if swarm is None:
        return Finding("version", "ok", mine)
    running = next((one.version for one in swarm.peers if one.id == swarm.own_id), "")
    if running and running != facts.version:
        text = f"{mine} is installed, but the running daemon is {running}"
        return Finding("version", "warning", text, ("molink down", "molink up  # or: molink join"))
    other = [one for one in swarm.others if one.version and one.version != facts.version]
    if other:
        names = ", ".join(f"{one.name} has {one.version}" for one in other)
        return Finding(
            "version",
            "warning",
            f"this PC has {mine}, but {names}: update all PCs to the same version, one by one",
            ("molink update  # in a clone: git pull, its installer, molink down, molink up",),
        )
    same = f", like all {len(swarm.peers)} PCs of the swarm" if swarm.others else ""
    return Finding("version", "ok", mine + same)
