"""Judges the state folder, the disk, sleep, the clock, and the versions in the swarm."""

from molinkd.cli.doctor.facts import Finding, PlaceFacts, SwarmFacts

#: Bytes of free disk below which nothing works, and below which few models fit.
_NO_ROOM, _LITTLE_ROOM = 500 << 20, 10 << 30
#: Seconds by which clocks may differ: beyond, times in logs mislead; far beyond, tokens and
#: certificates are taken for expired, or not yet valid.
_AMISS, _WRONG = 5.0, 300.0
#: Before this year there was no molink.
_FIRST_YEAR = 2025


def judge_place(facts: PlaceFacts, swarm: SwarmFacts | None) -> list[Finding]:
    """One line each."""
    return [
        _state(facts),
        _disk(facts),
        _sleep(facts),
        _clock(facts, swarm),
        _version(facts, swarm),
    ]


def _state(facts: PlaceFacts) -> Finding:
    windows = facts.system == "win32"
    if facts.unwritable:
        mend = f'icacls "{facts.home}" /grant "{facts.user}:(OI)(CI)F"'
        if not windows:
            mend = f'sudo chown -R "{facts.user}" "{facts.home}"'
        text = f"the state folder {facts.home} can't be written: {facts.unwritable}"
        return Finding("state", "problem", text, (mend, "molink doctor --home FOLDER"))
    if facts.damaged:
        return Finding(
            "state",
            "problem",
            f"molink can't start: the options of the last start can't be read ({facts.damaged})",
            ("molink doctor --fix",),
            "set-aside-options",
        )
    if facts.open_to_others:
        return Finding(
            "state",
            "warning",
            f"other users of this PC can look into {facts.home}, where its keys are",
            (f'chmod 700 "{facts.home}"',),
            "restrict-folder",
        )
    return Finding("state", "ok", f"{facts.home} can be written")


def _disk(facts: PlaceFacts) -> Finding:
    free = f"{facts.free / 1e9:.1f} GB are free on the disk of the state folder"
    taken = f"; models there take {facts.models / 1e9:.1f} GB" if facts.models else ""
    commands = ("molink list", "molink rm NAME") if facts.models else ()
    if facts.free < _NO_ROOM:
        text = f"{free}{taken}: neither models nor the swarm's state can be kept"
        return Finding("disk", "problem", text, commands)
    if facts.free < _LITTLE_ROOM:
        return Finding("disk", "warning", f"{free}{taken}: few models fit", commands)
    return Finding("disk", "ok", f"{free}{taken}")


def _sleep(facts: PlaceFacts) -> Finding:
    if facts.on_battery:
        text = "this PC runs on its battery: it may slow down, or fall asleep and take layers along"
        return Finding("sleep", "warning", f"{text}. Plug it in")
    if not facts.keep_awake:
        text = "`keep_awake` is off: this PC may fall asleep while it holds layers"
        return Finding("sleep", "ok", text)
    if not facts.inhibitor:
        return Finding(
            "sleep",
            "warning",
            "this PC can't be told to stay awake while it holds layers (no systemd-inhibit)",
            ("sudo systemctl mask sleep.target suspend.target",),
        )
    return Finding("sleep", "ok", "it stays awake while it holds layers")


def _clock(facts: PlaceFacts, swarm: SwarmFacts | None) -> Finding:
    commands = ("sudo timedatectl set-ntp true",)
    if facts.system == "win32":
        commands = ("w32tm /resync  # as administrator",)
    if facts.year < _FIRST_YEAR:
        text = f"this PC's clock says it is {facts.year}: tokens and certificates seem invalid"
        return Finding("clock", "problem", text, commands)
    if swarm is None or swarm.clock is None:
        return Finding("clock", "ok", "no other PC's clock to compare with")
    leader = swarm.name(swarm.leader)
    if swarm.leader == swarm.me:
        return Finding("clock", "ok", "this PC leads the swarm: the others' clocks go by its own")
    amiss = abs(swarm.clock) - swarm.unsure
    way = "ahead of" if swarm.clock > 0 else "behind"
    text = f"this PC's clock is {abs(swarm.clock):.1f} s {way} that of {leader}"
    if amiss > _WRONG:
        worse = f"{text}: tokens seem expired, or never end"
        return Finding("clock", "problem", worse, commands)
    if amiss > _AMISS:
        return Finding("clock", "warning", f"{text}: times in logs don't fit", commands)
    return Finding("clock", "ok", f"as that of {leader}, within {abs(swarm.clock):.1f} s")


def _version(facts: PlaceFacts, swarm: SwarmFacts | None) -> Finding:
    mine = f"molink {facts.version}"
    if swarm is None:
        return Finding("version", "ok", mine)
    here = next((one.version for one in swarm.peers if one.id == swarm.me), "")
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
