"""Print a Homebrew formula of a release.

    python -m tools.homebrew FOLDER URL

FOLDER is what ``tools.release`` made, URL where people will download it.
"""

import argparse
import re
from pathlib import Path
from string import Template

from tools.release import SUMS

#: The newest Python of Homebrew for which all locked packages have wheels.
_PYTHON = "3.14"
_FORMULA = Template("""\
class Molink < Formula
  desc "Pool the PCs you already own into one LLM server"
  homepage "$url"
  url "$url/$archive"
  sha256 "$archive_hash"
  license "Apache-2.0"

  depends_on "python@$python"

  on_macos do
    depends_on arch: :arm64
    depends_on macos: :sonoma
  end

  resource "requirements" do
    url "$url/requirements.txt"
    sha256 "$requirements_hash"
  end

  def install
    system "python$python", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-deps"]
    resource("requirements").stage do
      system(*pip, "--require-hashes", "-r", "requirements.txt")
    end
    system(*pip, "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/molink"
  end

  def caveats
    <<~TEXT
      After each installation or upgrade, install torch, which computes layers:
        molink setup
    TEXT
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/molink --version")
  end
end
""")


def main() -> None:
    """Print the formula."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    options = parser.parse_args()
    sums = (options.folder / SUMS).read_text(encoding="utf-8")
    print(write_formula(sums, options.url.rstrip("/")), end="")


def write_formula(sums: str, url: str) -> str:
    """Return the formula of the release whose ``SHA256SUMS`` is ``sums``.

    Raises:
        SystemExit: a file is missing there.
    """
    hashes = {name: digest for digest, name in map(str.split, sums.splitlines())}
    archives = [name for name in hashes if re.fullmatch(r"molink-[\d.]+\.tar\.gz", name)]
    if len(archives) != 1 or "requirements.txt" not in hashes:
        raise SystemExit(f"{SUMS} names no source archive of molink with its requirements.txt")
    return _FORMULA.substitute(
        url=url,
        python=_PYTHON,
        archive=archives[0],
        archive_hash=hashes[archives[0]],
        requirements_hash=hashes["requirements.txt"],
    )


if __name__ == "__main__":
    main()
