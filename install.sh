#!/usr/bin/env bash
# Installs molink into .venv of this clone, or the newest release where there is no clone; with
# options, shows it at work or checks it.
set -euo pipefail

# Where releases are; a release's own copy of this script says it.
RELEASES=''
# Empty if this comes through a pipe. Functions have other words for that.
SCRIPT=${BASH_SOURCE[0]:-}
# Free disk space in MB that an installation takes with each build of torch, downloads included.
NEED_CPU=3000
NEED_CUDA=8000
NEED_UPDATE=500

usage() {
  cat <<'TXT'
Usage: ./install.sh [options]

Makes .venv in this clone and installs molink into it. Run it again at any time: what is
installed is kept. Without a clone it installs the newest release into ~/.local/share/molink.

  --demo          then start three peers on this PC with the bundled model (Ctrl-C stops them)
  --ask TEXT      with --demo: print the answer to TEXT and exit
  --test          then install what the checks need and run all of them
  --cpu, --cuda   which build of torch (default: CUDA where there is an NVIDIA driver)
  --path          put molink on your PATH (default: ask in a terminal, else leave it)
  --from URL      where releases are, without a clone
  --python PATH   which Python (default: the first on the PATH that is 3.11 or newer)
  --help          this text
TXT
}

say() { printf '\n== %s\n' "$*"; }

die() {
  printf '\ninstall.sh: %s\n' "$1" >&2
  shift
  while [ $# -gt 0 ]; do
    printf '  %s\n' "$1" >&2
    shift
  done
  exit 1
}

parse() {
  demo='' ask='' asked='' checks='' flavour='' python='' path='' releases=$RELEASES
  while [ $# -gt 0 ]; do
    case $1 in
      --demo) demo=1 ;;
      --test) checks=1 ;;
      --path) path=1 ;;
      --cpu | --cuda)
        [ -z "$flavour" ] || [ "$flavour" = "${1#--}" ] || die "--cpu and --cuda exclude each other"
        flavour=${1#--}
        ;;
      --ask | --from | --python)
        [ $# -ge 2 ] || die "$1 needs a value" "see ./install.sh --help"
        case $1 in
          --ask) ask=$2 asked=1 ;;
          --from) releases=${2%/} ;;
          --python) python=$2 ;;
        esac
        shift
        ;;
      --help | -h)
        usage
        exit 0
        ;;
      *) die "unknown option $1" "see ./install.sh --help" ;;
    esac
    shift
  done
  [ -z "$asked" ] || [ -n "$demo" ] || die "--ask goes with --demo"
  case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
}

# Prints "3.11.7" and the like; nothing for a command that is no Python.
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null || true; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate version found='' hint
  hint="install one (Debian, Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python),"
  if [ -n "$python" ]; then
    version=$(version_of "$python")
    [ -n "$version" ] || die "--python $python: not a Python interpreter"
    is_new_enough "$python" || die "Python is too old: $python is $version, molink needs 3.11 or newer"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    version=$(version_of "$candidate")
    [ -n "$version" ] || continue
    if is_new_enough "$candidate"; then
      python=$candidate
      return
    fi
    found="$found $candidate is $version,"
  done
  [ -z "$found" ] ||
    die "Python is too old:$found molink needs 3.11 or newer" "$hint" "or name one with --python PATH"
  die "there is no Python on the PATH; molink needs 3.11 or newer" "$hint" "or name one with --python PATH"
}

# An explicit choice is remembered; otherwise the machine decides.
pick_flavour() {
  [ -z "$flavour" ] || return 0
  flavour=$(cat .venv/.molink-flavour 2>/dev/null || true)
  [ -z "$flavour" ] || return 0
  flavour=cpu
  if nvidia-smi -L >/dev/null 2>&1; then flavour=cuda; fi
}

installed_torch() {
  .venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

free_mb() { df -Pk . | awk 'NR == 2 { print int($4 / 1024) }'; }

check_disk() {
  local need=$NEED_CPU free
  [ "$flavour" = cpu ] || need=$NEED_CUDA
  [ -z "$(installed_torch)" ] || need=$NEED_UPDATE
  free=$(free_mb)
  case $free in '' | *[!0-9]*) return 0 ;; esac
  [ "$free" -ge "$need" ] ||
    die "the disk is too full: $free MB free in $PWD, about $need MB needed" \
      "free some space, or clone molink onto another disk"
}

make_venv() {
  local usable=''
  [ -z "$python" ] || find_python
  if [ -d .venv ]; then
    if is_new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then usable=1; fi
    # Scripts in a venv hold its path: a moved clone needs a new one.
    [ "$(cat .venv/.molink-clone 2>/dev/null || pwd)" = "$(pwd)" ] || usable=''
    [ -z "$python" ] || [ "$(version_of "$python")" = "$(version_of .venv/bin/python)" ] || usable=''
    [ -z "$usable" ] || return 0
    say "The .venv here can't be used (moved, broken or of another Python): recreating it"
  fi
  [ -n "$python" ] || find_python
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python ($(version_of "$python")) lacks the venv module" \
      "Debian, Ubuntu: sudo apt install python3-venv, then run this again"
  check_disk
  say "Making .venv with $python ($(version_of "$python"))"
  rm -rf .venv
  "$python" -m venv .venv || {
    rm -rf .venv
    explain_failure "making .venv"
  }
  pwd >.venv/.molink-clone
}

# pip_install WHAT ARGUMENTS...: installs, with pip's own progress; explains a failure.
pip_install() {
  local what=$1
  shift
  rm -f "$log"
  # For the checks it is compiled while another one runs.
  .venv/bin/python -m pip install --disable-pip-version-check --no-input --log "$log" \
    ${checks:+--no-compile} "$@" </dev/null ||
    explain_failure "$what"
}

explain_failure() {
  local free
  free=$(free_mb)
  if [ "${free:-9999}" -lt 100 ] || grep -q -e 'No space left' -e 'Errno 28' "$log" 2>/dev/null; then
    die "the disk is full ($1): ${free:-?} MB are free" "free some space and run this again"
  fi
  if [ -s "$log" ]; then
    printf '\nThe last lines of %s:\n' "$log" >&2
    # Without the indented lines, which are the frames of a traceback.
    grep -v -E '^[^ ]+  ' "$log" | tail -n 8 | cut -c 1-300 >&2
  fi
  die "$1 failed" \
    "is the network there, and HTTPS_PROXY set if it needs one? Run this again to continue." \
    "torch has builds for Python 3.11 to 3.14: name another with --python PATH."
}

# What .venv holds once this script has succeeded with the same files and options.
state() {
  .venv/bin/python - "$flavour" "$PWD" "$1" <<'PY'
import hashlib, pathlib, sys

locks = [f"requirements/{name}.txt" for name in ("base", "test", "torch")]
files = map(pathlib.Path, ["pyproject.toml", *locks])
options = "\n".join(sys.argv[1:]).encode()
print(hashlib.sha256(b"".join(file.read_bytes() for file in files) + options).hexdigest())
PY
}

is_installed() { [ "$(cat ".venv/.molink-$1" 2>/dev/null || true)" = "$(state "$1")" ]; }

install() {
  local extra=$1 locks=(-r requirements/base.txt)
  if is_installed "$extra" || { [ "$extra" = base ] && is_installed test; }; then return 0; fi
  check_disk
  say "Installing what molink needs, by the hashes in requirements/"
  [ "$extra" = base ] || locks+=(-r "requirements/$extra.txt")
  pip_install "installing what molink needs" --require-hashes --no-deps "${locks[@]}"
  say "Installing molink"
  pip_install "installing molink" --no-deps --no-build-isolation -e .
  say "Installing torch"
  .venv/bin/python -m molinkd setup "--$flavour" --lock requirements/torch.txt </dev/null || exit 1
  state "$extra" >".venv/.molink-$extra"
}

# Where there is no clone: a folder of molink's own.
enter_release() {
  [ -z "$checks" ] || die "--test needs a clone of the repository"
  [ -n "$releases" ] || die "there is no clone of molink here" "say where releases are: --from URL"
  case $releases in
    https://* | http://127.0.0.1[:/]* | http://localhost[:/]*) ;;
    *) die "--from $releases: releases come by https alone" ;;
  esac
  path=1
  mkdir -p "${XDG_DATA_HOME:-$HOME/.local/share}/molink"
  cd "${XDG_DATA_HOME:-$HOME/.local/share}/molink"
}

# fetch NAME: a file of the release, into download/.
fetch() {
  .venv/bin/python -c '
import socket, sys, urllib.request
socket.setdefaulttimeout(60)
try:
    urllib.request.urlretrieve(*sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")' "$releases/$1" "download/$1" ||
    die "$1 can't be fetched" "is the network there, and HTTPS_PROXY set if it needs one?"
}

check_hashes() {
  if command -v sha256sum >/dev/null; then
    sha256sum --check --quiet
  else # older versions of macOS
    shasum -a 256 --check >/dev/null
  fi
}

# Nothing is installed before all of it is here with the right hashes.
install_release() {
  local wheel pattern='molink-[0-9][0-9.]*-py3-none-any\.whl'
  if .venv/bin/molink --version >/dev/null 2>&1; then
    .venv/bin/molink update --from "$releases" </dev/null || exit 1
  else
    check_disk
    say "Fetching molink from $releases"
    rm -rf download
    mkdir download
    trap 'rm -rf download' EXIT
    fetch SHA256SUMS
    wheel=$(sed -n "s/^[0-9a-f]\{64\}  \($pattern\)\$/\1/p" download/SHA256SUMS)
    [ -n "$wheel" ] || die "$releases/SHA256SUMS names no wheel of molink"
    fetch "$wheel"
    fetch requirements.txt
    (cd download && grep -E "  ($pattern|requirements\.txt)\$" SHA256SUMS | check_hashes) ||
      die "the files of $releases don't have the hashes that SHA256SUMS says" "run this again later"
    say "Installing molink and what it needs"
    pip_install "installing molink" --require-hashes --no-deps -r download/requirements.txt
    pip_install "installing molink" --no-deps "download/$wheel"
    rm -r download
    trap - EXIT
  fi
  say "Installing torch"
  .venv/bin/molink setup "--$flavour" </dev/null || exit 1
}

# Puts a link to molink on the PATH, where --path or a person says so.
offer_path() {
  local program=$PWD/.venv/bin/molink folder=$HOME/.local/bin answer=''
  if ! [ "$folder/molink" -ef "$program" ]; then
    if [ -z "$path" ]; then
      if ! [ -t 0 ] || ! [ -t 1 ]; then
        echo "To call it as molink from any folder: ./install.sh --path (makes a link in $folder)"
        return 0
      fi
      read -r -p "Put molink on your PATH, by a link in $folder? [y/N] " answer || answer=''
      case $answer in [yY] | [yY][eE][sS]) ;; *) return 0 ;; esac
    fi
    if [ -e "$folder/molink" ] && ! [ -L "$folder/molink" ]; then
      die "$folder/molink exists and is not a link: remove it, then run ./install.sh --path"
    fi
    mkdir -p "$folder"
    ln -sfn "$program" "$folder/molink"
    echo "$folder/molink is a link to molink now; rm removes it"
  fi
  case :$PATH: in
    *":$folder:"*) ;;
    *)
      echo "$folder is not on your PATH: add this line to ~/.profile, and open a new terminal"
      # shellcheck disable=SC2016
      echo '  export PATH="$HOME/.local/bin:$PATH"'
      ;;
  esac
}

check() {
  local name=$1
  shift
  say "$name"
  .venv/bin/python "$@" </dev/null || die "the check failed: $name"
}

run_checks() {
  check "pip check" -m pip check --disable-pip-version-check
  check "ruff check" -m ruff check .
  check "ruff format --check" -m ruff format --check .
  # mypy takes one processor, and what was installed is compiled meanwhile on another one.
  .venv/bin/python -m compileall -q .venv/lib </dev/null >/dev/null 2>&1 &
  local compiling=$!
  # shellcheck disable=SC2064
  trap "kill $compiling 2>/dev/null || true" EXIT
  check "mypy" -m mypy
  wait "$compiling" || true # some packages have files that aren't Python
  trap - EXIT
  check "lint-imports" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
  check "pytest" -m pytest --color=no -n logical --maxprocesses 4 --dist loadfile
}

# torch has no build for Intel Macs, bitsandbytes none for older systems.
check_mac() {
  [ "$(uname -m)" = arm64 ] || die "molink needs a Mac with Apple silicon"
  [ "$(sw_vers -productVersion | cut -d. -f1)" -ge 14 ] || die "molink needs macOS 14 or newer"
  echo "Nobody has run molink on macOS yet; here it computes on the CPU alone."
}

main() {
  parse "$@"
  case $(uname -s) in
    MINGW* | MSYS* | CYGWIN*) die "on Windows run install.ps1 in PowerShell" ;;
    Darwin) check_mac ;;
  esac
  local explicit=$flavour clone=''
  [ -z "$SCRIPT" ] || clone=$(CDPATH='' cd "$(dirname "$SCRIPT")" && pwd)
  if [ -n "$clone" ] && [ -f "$clone/pyproject.toml" ]; then cd "$clone"; else clone='' && enter_release; fi
  log=.venv/install.log
  pick_flavour
  make_venv
  [ -z "$explicit" ] || echo "$explicit" >.venv/.molink-flavour
  if [ -z "$clone" ]; then
    install_release
  elif [ -n "$checks" ]; then install test; else install base; fi
  if [ -n "$checks" ]; then run_checks; fi
  if [ -n "$path" ]; then offer_path; fi
  if [ -n "$asked" ]; then exec .venv/bin/python -m molinkd demo --ask "$ask"; fi
  if [ -n "$demo" ]; then exec .venv/bin/python -m molinkd demo; fi
  if [ -z "$checks" ]; then
    say "molink is installed: try ${clone:+.venv/bin/}molink demo, or ${clone:+.venv/bin/}molink up"
    [ -n "$path" ] || offer_path
  fi
}

main "$@"
