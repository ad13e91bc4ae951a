"""``molink doctor``."""

import contextlib
import dataclasses
import json
import sys
from typing import Annotated, get_args

import typer

from molink.files import retry_while_busy
from molink.plaintext import printable
from molinkd.cli.doctor.collect import collect_facts
from molinkd.cli.doctor.device_checks import check_device
from molinkd.cli.doctor.facts import DoctorFacts, Finding, Level
from molinkd.cli.doctor.host_checks import check_host
from molinkd.cli.doctor.network_checks import check_network
from molinkd.cli.plain_table import count_columns, pad_cell
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.cli.translation import tr, tr_count
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
        text = tr("molink is not running on this PC; swarm checks are skipped")
        return Finding("daemon", "ok", text)
    if trouble:
        text = tr(
            "molink runs (process {pid}) and reports: {trouble}",
            pid=facts.daemon_pid,
            trouble=trouble,
        )
        return Finding("daemon", "warning", text, ("molink status", "molink logs"))
    return Finding("daemon", "ok", tr("molink runs (process {pid})", pid=facts.daemon_pid))


def format_report(findings: list[Finding]) -> str:
    """Format the report: a line per check, then the commands."""
    names = [tr(one.check) for one in findings]
    level_width = max(count_columns(tr(level)) for level in get_args(Level)) + 1
    name_width = max(map(count_columns, names))
    lines = [
        f"{pad_cell(tr(one.level), level_width)} {pad_cell(name, name_width)}  "
        f"{printable(one.text)}"
        for name, one in zip(names, findings, strict=True)
    ]
    amiss = [one for one in findings if one.level != "ok" and one.commands]
    # Problems first.
    for one in sorted(amiss, key=lambda finding: finding.level != "problem"):
        lines += [
            "",
            f"{tr(one.check)}:",
            *(f"    {printable(format_command(text))}" for text in one.commands),
        ]
    if any(one.fix is not None for one in findings):
        fix = format_command("molink doctor --fix")
        lines += ["", tr("`{fix}` repairs the state folder.", fix=fix)]
    counts = [sum(one.level == level for one in findings) for level in ("problem", "warning")]
    problems, warnings = counts
    summary = ", ".join(
        (
            tr_count("{count} problem", "{count} problems", problems)
            if problems
            else tr("no problems"),
            tr_count("{count} warning", "{count} warnings", warnings)
            if warnings
            else tr("no warnings"),
        )
    )
    lines += ["", f"{summary[0].upper()}{summary[1:]}."]
    return "\n".join(lines)


def apply_fix(finding: Finding, home: Home) -> Finding:
    """Apply the safe fix of a finding; returns the finding after it."""
    done = ""
    with contextlib.suppress(OSError):
        if finding.fix == "set-aside-options":
            aside = home.options.with_suffix(".damaged")
            retry_while_busy(lambda: home.options.replace(aside))
            done = tr(
                "fixed: {file} was moved to {aside}; pass your options again",
                file=home.options,
                aside=aside,
            )
        elif finding.fix == "restrict-folder":
            home.root.chmod(0o700)
            done = tr("fixed: only you can access {folder} now", folder=home.root)
    return Finding(finding.check, "ok", done) if done else finding


def _finding_json(finding: Finding) -> dict[str, object]:
    return {**dataclasses.asdict(finding), "commands": list(finding.commands)}
