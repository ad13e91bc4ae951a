"""Tables of documents that commands make."""

from pathlib import Path


def replace_table(document: Path, name: str, table: str) -> None:
    """Replace what stands between the marks ``name: begin`` and ``name: end`` of a document.

    Raises:
        ValueError: The document has no such marks.
    """
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_start, rest = document.read_text(encoding="utf-8").partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"{document} has no {start} and {end}")
    made = f"{before}{start}\n\n{table}\n\n{end}{after}"
    document.write_text(made, encoding="utf-8", newline="\n")
