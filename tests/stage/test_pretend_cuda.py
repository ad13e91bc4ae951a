"""A GPU's code on a fake card: no mixed devices, no waits, the same rows as on a CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from molink.checkpoint.model_source import find_demo_model
from tests.support import fake_cuda as pretend_cuda
from tests.support.models import MakeModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # a minute to compile, and one to compute
    pytest.mark.skipif(sys.platform != "linux", reason="it is built with g++ on Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="it is built with g++"),
]


def test_stages_and_trials_on_a_pretend_card(make_model: MakeModel, tmp_path: Path) -> None:
    library = pretend_cuda.build(tmp_path)
    experts = make_model(tmp_path / "experts", "qwen3_moe")
    command = [sys.executable, "-m", "tests.support.fake_cuda", str(library)]
    done = subprocess.run(
        [*command, str(find_demo_model().path), str(experts)],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    trials = [line["trial"] for line in lines if "trial" in line]
    assert {one["kernel"] for one in trials} >= {"flash-attention", "int8", "nf4", "pinned-copies"}
    # As on an RTX 20, float16 has no flash kernel; Triton compiles nothing for a fake card.
    wrong = [one for one in trials if one["state"] == "wrong"]
    absent = {(one["kernel"], one["dtype"]) for one in trials if one["state"] == "absent"}
    kernels = "compiled-rows", "compiled-sampling", "gguf-blocks", "triton-attention"
    no_triton = {(kernel, dtype) for kernel in kernels for dtype in ("bf16", "f16")}
    assert (wrong, absent) == ([], {("flash-attention", "f16"), *no_triton})
    sampled = [line["sampling"] for line in lines if "sampling" in line]
    assert len(sampled) == 2
    for kinds in sampled:
        assert all(told["same"] and told["failed"] for told in kinds.values()), kinds
        # The last case waits for the 64 likeliest tokens, 4096, all of them, and its logprob.
        assert [told["waits"] for told in kinds.values()] == [1, 1, 1, 1, 4], kinds
    # A benchmark's pass reads what a worker does: rows to send, or tokens, but never logits.
    for read in (line["read"] for line in lines if "read" in line):
        assert read["inner"] >= 4 * read["rows"] * read["hidden"], read
        assert read["last"] < read["rows"] * read["vocabulary"] / 8, read
    mixtures = [line for line in lines if "experts" in line]
    assert len(mixtures) == 4  # with all experts on the card, and with some in host memory
    # Experts are swapped; a card loads them from the files again.
    assert [line["experts"]["swaps"] > 0 for line in mixtures] == [False, True] * 2
    for line in mixtures:
        assert not line["experts"]["graphs"]
        assert line["experts"]["error"] < 1e-3, line
        # One wait per layer; with experts in host memory it is on an event, which isn't counted.
        assert set(line["experts"]["waits"]) == {line["waits"]}, line
    # Memory plans assume no kernel that is missing.
    assert [line["proven"] for line in lines if "proven" in line] == [["flash-attention"], []]
    cases = [line for line in lines if "case" in line]
    assert len(cases) == 2 * 3 * 3
    for case in cases:
        assert case["error"] < (0.03 if case["case"][0] == "bf16" else 0.01), case
        assert case["graphs"], case
        assert case["waits"][-2:] == [0, 0], case  # the pass before was captured
        assert case["flash"] == (len(case["case"]) == 2), case
        assert case["drafts"] == case["flash"], case
