"""Judges the state folder, the disk, sleep, the clock, and the versions in the swarm."""

from molinkd.cli.doctor.facts import Finding, HostFacts, SwarmFacts

#: Bytes of free disk below which nothing works, and below which few models fit.
_NO_ROOM, _LITTLE_ROOM = 500 << 20, 10 << 30
#: Seconds by which clocks may differ: beyond, times in logs mislead; far beyond, tokens and
#: certificates are taken for expired, or not yet valid.
_AMISS, _WRONG = 5.0, 300.0
#: Before this year there was no molink.
_FIRST_YEAR = 2025


def check_host(facts: HostFacts, swarm: SwarmFacts | None) -> list[Finding]:
    """One line each."""
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
        mend = f'icacls "{facts.home}" /grant "{facts.user}:(OI)(CI)F"'
        if not windows:
            mend = f'sudo chown -R "{facts.user}" "{facts.home}"'
        text = f"the state folder {facts.home} can't be written: {facts.write_error}"
        return Finding("state", "problem", text, (mend, "molink doctor --home FOLDER"))
    if facts.options_error:
        return Finding(
            "state",
            "problem",
            f"molink can't start: the options of the last start can't be read "
            f"({facts.options_error})",
            ("molink doctor --fix",),
            "set-aside-options",
        )
    if facts.is_open_to_others:
        return Finding(
            "state",
            "warning",
            f"other users of this PC can look into {facts.home}, where its keys are",
            (f'chmod 700 "{facts.home}"',),
            "restrict-folder",
        )
    return Finding("state", "ok", f"{facts.home} can be written")


def _check_disk(facts: HostFacts) -> Finding:
    free = f"{facts.free_bytes / 1e9:.1f} GB are free on the disk of the state folder"
    taken = f"; models there take {facts.model_bytes / 1e9:.1f} GB" if facts.model_bytes else ""
    commands = ("molink list", "molink rm NAME") if facts.model_bytes else ()
    if facts.free_bytes < _NO_ROOM:
        text = f"{free}{taken}: neither models nor the swarm's state can be kept"
        return Finding("disk", "problem", text, commands)
    if facts.free_bytes < _LITTLE_ROOM:
        return Finding("disk", "warning", f"{free}{taken}: few models fit", commands)
    return Finding("disk", "ok", f"{free}{taken}")


def _check_sleep(facts: HostFacts) -> Finding:
    if facts.on_battery:
        text = "this PC runs on its battery: it may slow down, or fall asleep and take layers along"
        return Finding("sleep", "warning", f"{text}. Plug it in")
    if not facts.keep_awake:
        text = "`keep_awake` is off: this PC may fall asleep while it holds layers"
        return Finding("sleep", "ok", text)
    if not facts.has_inhibitor:
        return Finding(
            "sleep",
            "warning",
            "this PC can't be told to stay awake while it holds layers (no systemd-inhibit)",
            ("sudo systemctl mask sleep.target suspend.target",),
        )
    return Finding("sleep", "ok", "it stays awake while it holds layers")


def _check_clock(facts: HostFacts, swarm: SwarmFacts | None) -> Finding:
    commands = ("sudo timedatectl set-ntp true",)
    if facts.system == "win32":
        commands = ("w32tm /resync  # as administrator",)
    if facts.year < _FIRST_YEAR:
        text = f"this PC's clock says it is {facts.year}: tokens and certificates seem invalid"
        return Finding("clock", "problem", text, commands)
    if swarm is None or swarm.clock_offset_s is None:
        return Finding("clock", "ok", "no other PC's clock to compare with")
    leader = swarm.peer_name(swarm.leader)
    if swarm.leader == swarm.own_id:
        return Finding("clock", "ok", "this PC leads the swarm: the others' clocks go by its own")
    amiss = abs(swarm.clock_offset_s) - swarm.clock_error_s
    way = "ahead of" if swarm.clock_offset_s > 0 else "behind"
    text = f"this PC's clock is {abs(swarm.clock_offset_s):.1f} s {way} that of {leader}"
    if amiss > _WRONG:
        worse = f"{text}: tokens seem expired, or never end"
        return Finding("clock", "problem", worse, commands)
    if amiss > _AMISS:
        return Finding("clock", "warning", f"{text}: times in logs don't fit", commands)
    return Finding("clock", "ok", f"as that of {leader}, within {abs(swarm.clock_offset_s):.1f} s")


def _check_version(facts: HostFacts, swarm: SwarmFacts | None) -> Finding:
    mine = f"molink {facts.version}"
    if swarm is None:
        return Finding("version", "ok", mine)
    here = next((one.version for one in swarm.peers if one.id == swarm.own_id), "")
    if here and here != facts.version:
        text = f"this is {mine}, but the daemon that runs here is still {here}"
        return Finding("version", "warning", text, ("molink down", "molink up  # or: molink join"))
    other = [one for one in swarm.others if one.version and one.version != facts.version]
    if other:
        names = ", ".join(f"{one.name} has {one.version}" for one in other)
        return Finding(
            "version",
            "warning",
            f"this PC has {mine}, but {names}: give all PCs the same version, one by one",
            ("git pull && ./install.sh", "molink down", "molink up  # or: molink join")
            if facts.system != "win32"
            else (
                "git pull; powershell -ExecutionPolicy Bypass -File install.ps1",
                "molink down",
                "molink up  # or: molink join",
            ),
        )
    same = f", as all {len(swarm.peers)} PCs of the swarm" if swarm.others else ""
    return Finding("version", "ok", mine + same)
