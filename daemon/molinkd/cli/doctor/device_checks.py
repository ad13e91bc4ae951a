"""Checks torch, the GPU driver, and the kernels of this PC's device."""

import re

from molink.facts.kernels import FALLBACKS, USED_ONLY_FOR
from molinkd.cli.doctor.facts import DeviceFacts, Finding
from molinkd.cli.translation import tr
from molinkd.peer.agent.kernel_self_test import KernelResult, TorchGpu, TorchInfo

_DRIVERS_URL = "https://www.nvidia.com/drivers"
#: Installs the CUDA build of torch for the driver.
_CUDA_COMMAND = "molink setup --cuda"
#: Commands that select the CPU.
_CPU_COMMANDS = ("molink up --device cpu  # or: molink join --device cpu",)
_DLL_ERROR = re.compile(r"DLL|WinError (126|127|1114)")


def check_device(facts: DeviceFacts) -> list[Finding]:
    """Check torch, the GPU and the kernels; one finding each."""
    about = facts.test.about
    if about is None:
        return [_check_missing_torch(facts)]
    found = [_check_torch(facts, about)]
    gpu = _check_gpu(facts, about)
    if gpu is not None:
        found.append(gpu)
    if about.gpus and about.triton_problem and facts.configured_device != "cpu":
        found.append(_check_triton(facts, about.triton_problem))
    found.append(_check_kernels(facts))
    return found


def _driver_commands(system: str) -> tuple[str, ...]:
    if system == "win32":
        note = tr("install the driver, then restart this PC")
        return (f"start {_DRIVERS_URL}  # {note}",)
    note = tr("not Ubuntu: {url}", url=_DRIVERS_URL)
    return (f"sudo ubuntu-drivers install && sudo reboot  # {note}",)


def _check_missing_torch(facts: DeviceFacts) -> Finding:
    failure = facts.test.failure or tr("unknown error")
    commands = ["molink setup"]
    if facts.system == "win32" and _DLL_ERROR.search(failure):
        commands.insert(0, "winget install Microsoft.VCRedist.2015+.x64")
    text = tr("torch can't be used, so this PC can't hold layers: {failure}", failure=failure)
    return Finding("torch", "problem", text, tuple(commands))


def _check_torch(facts: DeviceFacts, about: TorchInfo) -> Finding:
    card, text = facts.card, tr("torch {version} (CPU build)", version=about.torch)
    if about.cuda:
        text = tr("torch {version} (for CUDA {cuda})", version=about.torch, cuda=about.cuda)
    has_card = bool(card is not None and card.names) or bool(facts.is_plugged_in)
    if about.cuda is None and has_card and facts.configured_device != "cpu":
        name = card.names[0] if card is not None and card.names else tr("an NVIDIA GPU")
        return Finding(
            "torch",
            "problem",
            tr(
                "{torch}: the GPU of this PC ({name}) is not used; everything runs on the CPU",
                torch=text,
                name=name,
            ),
            (_CUDA_COMMAND,),
        )
    return Finding("torch", "ok", text)


def _check_gpu(facts: DeviceFacts, about: TorchInfo) -> Finding | None:
    """Check the driver and torch's use of the GPU; ``None`` if no GPU is configured."""
    card, system = facts.card, facts.system
    if about.cuda is None or facts.configured_device == "cpu":
        return None
    if about.gpus:
        return _check_architecture(about, about.gpus)
    if card is None:
        if facts.is_plugged_in:
            text = tr("an NVIDIA GPU is installed, but its driver is not (no nvidia-smi)")
            return Finding("gpu", "problem", text, _driver_commands(system))
        return Finding("gpu", "ok", tr("no NVIDIA GPU found: this PC computes on its CPU"))
    if card.error:
        return Finding(
            "gpu",
            "problem",
            tr("the GPU driver does not respond: {error}", error=card.error),
            _restart_commands(system),
        )
    if _major_version(card.cuda) < _major_version(about.cuda):
        return Finding(
            "gpu",
            "problem",
            tr(
                "driver {driver} supports CUDA up to {newest}, but torch was built for {cuda}: the "
                "GPU can't be used. Update the driver, or install a torch build for this driver",
                driver=card.driver,
                newest=card.cuda,
                cuda=about.cuda,
            ),
            (*_driver_commands(system), _CUDA_COMMAND),
        )
    why = about.reason or tr(
        "torch finds no GPU, but nvidia-smi does; is CUDA_VISIBLE_DEVICES set?"
    )
    text = tr("torch can't use the GPU: {why}", why=why)
    return Finding("gpu", "problem", text, _restart_commands(system))


def _restart_commands(system: str) -> tuple[str, ...]:
    """A new driver takes effect after a restart."""
    return ("Restart-Computer" if system == "win32" else "sudo reboot", "nvidia-smi")


def _check_architecture(about: TorchInfo, gpus: tuple[TorchGpu, ...]) -> Finding:
    for gpu in gpus:
        if not _has_code(about.kernels_for, gpu.capability):
            have = ", ".join(about.kernels_for)
            return Finding(
                "gpu",
                "problem",
                tr(
                    "this torch build does not support {gpu} (compute capability {capability}; "
                    "supported: {supported}): an older GPU can't be used, a newer one needs a "
                    "newer torch",
                    gpu=gpu.name,
                    capability=gpu.capability,
                    supported=have,
                ),
                _CPU_COMMANDS,
            )
    names = ", ".join(gpu.name for gpu in gpus)
    return Finding("gpu", "ok", tr("torch uses {gpus}", gpus=names))


def _check_triton(facts: DeviceFacts, problem: str) -> Finding:
    """Say what the GPU misses without Triton."""
    commands = (_CUDA_COMMAND,)
    if facts.system != "win32" and "installed" not in problem:
        commands = (f"sudo apt install gcc python3-dev  # {tr('then start molink again')}",)
    text = tr(
        "Triton can't compile kernels for the GPU ({problem}): molink uses slower ones",
        problem=problem,
    )
    return Finding("triton", "warning", text, commands)


def _has_code(kernels_for: tuple[str, ...], capability: str) -> bool:
    """Machine code runs on its major version, equal or newer minors; PTX on all newer."""
    if not kernels_for:
        return True
    major, _, minor = capability.partition(".")
    wanted = int(major), int(minor or 0)
    for one in kernels_for:
        kind, _, digits = one.partition("_")
        number = re.match(r"\d{2,3}", digits)
        if number is None:
            continue
        given = int(number[0][:-1]), int(number[0][-1])
        fits = given <= wanted and (kind == "compute" or given[0] == wanted[0])
        if fits:
            return True
    return False


def _major_version(version: str | None) -> int:
    """Return ``12`` for ``12.8``; a large number if unknown, so that no check fails."""
    major_text = (version or "").partition(".")[0]
    return int(major_text) if major_text.isdecimal() else 1000


def _check_kernels(facts: DeviceFacts) -> Finding:
    test = facts.test
    works = {(one.kernel, one.dtype) for one in test.results if one.state == "ok"}

    def is_idle(spare: KernelResult) -> bool:
        of = USED_ONLY_FOR.get(spare.kernel, ())
        return bool(of) and all((name, spare.dtype) in works for name in of)

    wrong = [one for one in test.results if one.state == "wrong" and not is_idle(one)]
    right = len({one.kernel for one in test.results if one.state == "ok"})
    if not wrong and test.failure:
        text = tr(
            "the self-test of {device} failed: {failure}",
            device=test.device or tr("the device"),
            failure=test.failure,
        )
        return Finding("kernels", "problem", text, ("molink doctor --json",))
    if not wrong:
        text = tr(
            "{count} kernels of {device} ({name}) match plain torch",
            count=right,
            device=test.device,
            name=test.name,
        )
        return Finding("kernels", "ok", text)
    texts = ", ".join(_describe_failure(one) for one in _first_per_kernel(wrong))
    without = [one.kernel for one in wrong if one.kernel not in FALLBACKS]
    if without:
        return Finding(
            "kernels",
            "problem",
            tr(
                "{device} ({name}) computes wrong results, and {kernel} has no replacement: "
                "{failures}. A likely cause is overclocked or failing memory",
                device=test.device,
                name=test.name,
                kernel=without[0],
                failures=texts,
            ),
            _fallback_commands(test.device),
        )
    instead = "; ".join(f"{name}: {FALLBACKS[name]}" for name in test.disabled_kernels)
    return Finding(
        "kernels",
        "warning",
        tr(
            "{failures}. Workers avoid it from their next start and use: {instead}",
            failures=texts,
            instead=instead,
        ),
        ("molink down", "molink up  # or: molink join"),
    )


def _fallback_commands(device: str) -> tuple[str, ...]:
    if device.startswith("cuda"):
        return _CPU_COMMANDS
    return ("molink up --stage none  # or: molink join --stage none",)


def _first_per_kernel(wrong: list[KernelResult]) -> list[KernelResult]:
    return list({one.kernel: one for one in reversed(wrong)}.values())[::-1]


def _describe_failure(one: KernelResult) -> str:
    if one.error is None:
        return tr(
            "{kernel} ({dtype}) fails: {reason}",
            kernel=one.kernel,
            dtype=one.dtype,
            reason=one.reason,
        )
    return tr(
        "{kernel} ({dtype}) is off by {error:.2g} (tolerance {tolerance:.2g})",
        kernel=one.kernel,
        dtype=one.dtype,
        error=one.error,
        tolerance=one.tolerance,
    )
