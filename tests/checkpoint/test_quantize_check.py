"""Early checks of ``--quantize``."""

from types import SimpleNamespace
from typing import Any

import pytest

from molink.checkpoint import quantize_check as module
from molink.checkpoint.quantize_check import check_quantize, check_quantize_files
from molink.errors import UsageError


def config(stored: str) -> Any:
    return SimpleNamespace(quantized=stored)


@pytest.mark.parametrize("wanted", ["none", "int8", "nf4"])
def test_files_with_another_quantization(wanted: Any) -> None:
    check_quantize_files(wanted, config("none"))
    check_quantize_files(wanted, config(wanted))
    check_quantize_files("none", config(wanted))


@pytest.mark.parametrize(("wanted", "stored"), [("int8", "nf4"), ("nf4", "int8")])
def test_a_mismatch_names_both_quantizations(wanted: Any, stored: str) -> None:
    with pytest.raises(UsageError, match=f"--quantize {wanted} .* quantized as {stored}"):
        check_quantize(wanted, config(stored))


def test_the_package_is_needed_only_where_something_is_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    check_quantize("none", config("none"), "cuda")
    check_quantize("int8", config("none"), "cpu")
    with pytest.raises(UsageError, match="int8 weights need bitsandbytes"):
        check_quantize("int8", config("none"), "cuda")
    for wanted, stored in (("nf4", "none"), ("none", "nf4"), ("nf4", "nf4")):
        with pytest.raises(UsageError, match="nf4 weights need bitsandbytes") as caught:
            check_quantize(wanted, config(stored))  # type: ignore[arg-type]
        assert caught.value.exit_code == 2
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    check_quantize("nf4", config("none"))
