"""Exit codes tell errors apart, and the module's tree says which is which."""

import re
from pathlib import Path

import molink.errors as errors


def test_no_two_kinds_share_an_exit_code() -> None:
    own = {
        kind.__name__: kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.MolinkError)
        and "exit_code" in vars(kind)
    }
    assert len(set(own.values())) == len(own)
    told = re.findall(r"(\w+) .*\(exit code (\d+)\)", errors.__doc__ or "")
    assert {name: int(code) for name, code in told}.items() <= own.items()
    table = (Path(__file__).parent.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    shown = set(map(int, re.findall(r"^\| (\d+) \|", table.partition("## Exit codes")[2], re.M)))
    assert shown == {*own.values(), 0, 130}
