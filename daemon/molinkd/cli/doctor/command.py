"""``molink doctor``."""

import contextlib
import dataclasses
import json
import sys
from typing import Annotated

import typer

from molink.files import retry_while_busy
from molink.plaintext import printable
from molinkd.cli.doctor.collect import collect_facts
from molinkd.cli.doctor.device_checks import check_device
from molinkd.cli.doctor.facts import DoctorFacts, Finding
from molinkd.cli.doctor.host_checks import check_host
from molinkd.cli.doctor.network_checks import check_network
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.command_line import format_command
from molinkd.peer.home import Home


def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Apply safe fixes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Check this PC and suggest fixes.

    Also tests the kernels of its device; workers avoid faulty ones. Exits with 1 if there is a
    problem.
    """
    place = Home.find_home(home)

    def say(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr, flush=True)

    facts = collect_facts(place, say)
    findings = run_checks(facts)
    if fix:
        findings = [apply_fix(one, place) for one in findings]
    if as_json:
        problems = any(one.level == "problem" for one in findings)
        result = {"ok": not problems, "checks": [_finding_json(one) for one in findings]}
        print(json.dumps(result, indent=2))
    else:
        print(format_report(findings))
    raise typer.Exit(int(any(one.level == "problem" for one in findings)))


def run_checks(facts: DoctorFacts) -> list[Finding]:
    """Run all checks, in the order of the report."""
    found = [_check_daemon(facts)]
    found += check_device(facts.device)
    found += check_network(facts.network, facts.swarm, facts.daemon_pid)
    return found + check_host(facts.host, facts.swarm)


def _check_daemon(facts: DoctorFacts) -> Finding:
    trouble = facts.host.trouble
    if not facts.daemon_pid:
        text = "molink is not running on this PC; swarm checks are skipped"
        return Finding("daemon", "ok", text)
    if trouble:
        text = f"molink runs (process {facts.daemon_pid}) and reports: {trouble}"
        return Finding("daemon", "warning", text, ("molink status", "molink logs"))
    return Finding("daemon", "ok", f"molink runs (process {facts.daemon_pid})")


def format_report(findings: list[Finding]) -> str:
    """Format the report: a line per check, then the commands."""
    width = max(len(one.check) for one in findings)
    lines = [f"{one.level:<8} {one.check:<{width}}  {printable(one.text)}" for one in findings]
    amiss = [one for one in findings if one.level != "ok" and one.commands]
    # Problems first.
    for one in sorted(amiss, key=lambda finding: finding.level != "problem"):
        lines += [
            "",
            f"{one.check}:",
            *(f"    {printable(format_command(text))}" for text in one.commands),
        ]
    if any(one.fix is not None for one in findings):
        fix = format_command("molink doctor --fix")
        lines += ["", f"`{fix}` repairs the state folder."]
    counts = [sum(one.level == level for one in findings) for level in ("problem", "warning")]
    summary = f"{_count_text(counts[0], 'problem')}, {_count_text(counts[1], 'warning')}."
    lines += ["", summary[0].upper() + summary[1:]]
    return "\n".join(lines)


def apply_fix(finding: Finding, home: Home) -> Finding:
    """Apply the safe fix of a finding; returns the finding after it."""
    done = ""
    with contextlib.suppress(OSError):
        if finding.fix == "set-aside-options":
            aside = home.options.with_suffix(".damaged")
            retry_while_busy(lambda: home.options.replace(aside))
            done = f"fixed: {home.options} was moved to {aside}; pass your options again"
        elif finding.fix == "restrict-folder":
            home.root.chmod(0o700)
            done = f"fixed: only you can access {home.root} now"
    return Finding(finding.check, "ok", done) if done else finding


def _count_text(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


def _finding_json(finding: Finding) -> dict[str, object]:
    return {**dataclasses.asdict(finding), "commands": list(finding.commands)}
