"""Write the lock files in ``requirements/`` (needs ``uv``).

    python -m tools.lock [--upgrade]

Run it after changing dependencies in ``pyproject.toml``. One resolution covers Linux, Windows and
every supported Python.
"""

import argparse
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

from molinkd.cli.installation.torch_build import TORCH

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
#: The default index's torch (CUDA on Linux) and its own dependencies; PCs may use another build.
OF_TORCH = re.compile(r"(torch|triton|nvidia-(?!ml-py).*|cuda-.*)==")
HEADER = "# Made by `python -m tools.lock`: {}.\n"


def main() -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    built_with = [*project["build-system"]["requires"], f"torch=={TORCH}"]
    old = [] if options.upgrade else sorted(FOLDER.glob("*.txt"))
    with tempfile.TemporaryDirectory() as folder:
        whole = resolve_target(
            Path(folder) / "all.txt", ["--extra", "torch", "--extra", "test"], built_with, old
        )
        needed = resolve_target(
            Path(folder) / "base.txt", ["--extra", "torch"], built_with, [Path(folder) / "all.txt"]
        )
        site = resolve_target(
            Path(folder) / "docs.txt",
            ["--extra", "torch", "--extra", "docs"],
            built_with,
            [Path(folder) / "all.txt", *old],
        )
    pins = set(map(read_pin, needed))
    torch = [block for block in whole if OF_TORCH.match(block)]
    base = [block for block in whole if read_pin(block) in pins and block not in torch]
    more = [block for block in whole if block not in torch and block not in base]
    # The checks need it with a CPU build of torch, too.
    more += [block for block in torch if block.startswith("triton==")]
    # Some packages of base.txt are for fewer PCs there.
    known = {read_head(block) for block in (*base, *torch)}
    site = [block for block in site if known.isdisjoint((read_head(block), read_pin(block)))]
    write_lock("base.txt", "what molink needs, beside torch", base)
    write_lock("torch.txt", "torch as the default index has it, and what only it needs", torch)
    write_lock("test.txt", "what the checks need beside base.txt", more)
    write_lock("docs.txt", "what the site needs beside base.txt", site)


def resolve_target(
    target: Path, options: list[str], more: list[str], fixed: list[Path]
) -> list[str]:
    """Resolve to ``target``; return its blocks, a requirement with hashes each."""
    source = target.with_suffix(".in")
    source.write_text("\n".join(more) + "\n", encoding="utf-8")
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-annotate", "--no-header", "--output-file", str(target)]
    for path in fixed:
        command += ["--constraint", str(path)]
    subprocess.run([*command, *options, "pyproject.toml", str(source)], cwd=ROOT, check=True)
    text = target.read_text(encoding="utf-8")
    return [block + "\n" for block in re.split(r"\n(?=\S)", text.strip())]


def read_pin(block: str) -> str:
    """Name and version of a block, without markers."""
    return block.split()[0]


def read_head(block: str) -> str:
    """Name, version and marker of a block."""
    return block.partition("\\")[0].strip()


def write_lock(name: str, what: str, blocks: list[str]) -> None:
    """Write one file."""
    FOLDER.mkdir(exist_ok=True)
    text = HEADER.format(what) + "".join(blocks)
    (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
