import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from molink.errors import MolinkError, Unavailable, UsageError
from molinkd.cli.bench import bench_app
from tests.support.fake_openai import FakeOpenAI

RUNNER = CliRunner()
KEYS = {
    "policy",
    "completed",
    "failed",
    "duration_s",
    "requests_per_s",
    "output_tokens_per_s",
    "ttft_s",
    "tpot_s",
    "itl_s",
    "latency_s",
}


def bench(*arguments: str) -> Result:
    return RUNNER.invoke(bench_app, ["serve", *arguments])


def test_json_result(fake: FakeOpenAI, threaded_url: str) -> None:
    result = bench(
        *("--url", threaded_url, "--requests", "6", "--concurrency", "3", "--warmup", "2"),
        *("--input-tokens", "40", "--output-tokens", "5", "--rate", "inf", "--json"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report.keys() >= KEYS
    assert (report["completed"], report["failed"], report["output_tokens"]) == (6, 0, 30)
    assert report["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}
    assert len(fake.bodies) == 2 + 2 + 6
    # Only the result is printed if stderr is not a terminal.
    assert result.stderr == ""


def test_table_and_failures(fake: FakeOpenAI, threaded_url: str) -> None:
    fake.refused = {4}
    result = bench("--url", threaded_url, "--requests", "3", "--output-tokens", "2")
    assert result.exit_code == 0
    assert "2 completed, 1 failed" in result.stdout
    assert "1 requests failed; first error: HTTP 429: queues are full" in result.stderr


def test_a_trace(fake: FakeOpenAI, threaded_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 20 + 2 * i, "output_length": 1 + i} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = bench("--url", threaded_url, "--trace", str(trace), "--requests", "3", "--json")
    report = json.loads(result.stdout)
    assert (report["completed"], report["output_tokens"]) == (3, 1 + 2 + 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "--rate"),
        (["--trace", "nowhere.csv"], "can't read the trace"),
        (["--trace", "nowhere.csv", "--input-tokens", "3"], "omit --input-tokens"),
        (["--output-tokens", "0"], "--output-tokens"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    result = bench("--url", "http://127.0.0.1:9", *arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_nothing_completed(fake: FakeOpenAI, threaded_url: str) -> None:
    fake.refused = set(range(3, 10))
    result = bench("--url", threaded_url, "--requests", "2", "--json")
    assert isinstance(result.exception, Unavailable)
    assert "HTTP 429" in str(result.exception)
    assert json.loads(result.stdout)["failed"] == 2


def test_unreachable() -> None:
    result = bench("--url", "http://127.0.0.1:9")
    assert isinstance(result.exception, MolinkError)
    assert result.exception.exit_code == 6


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for one process on Windows")
def test_an_interrupt_prints_partial_results(fake: FakeOpenAI, threaded_url: str) -> None:
    fake.held_from = 6
    code = (
        # A background job of a script inherits an ignored SIGINT.
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from molink.bench import runner\n"
        "import molinkd.cli.bench as command\n"
        "done = []\n"
        "def tell(plan, send, *, on_sample, **rest):\n"
        "    def count(sample):\n"
        "        on_sample(sample)\n"
        "        done.append(sample)\n"
        "        if len(done) == 3: print('three', flush=True)\n"
        "    return runner.run_plan(plan, send, on_sample=count, **rest)\n"
        "command.run_plan = tell\n"
        "command.bench_app()\n"
    )
    arguments = ["serve", "--url", threaded_url, "--output-tokens", "2", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"three\n"
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    report = json.loads(out)
    assert (report["interrupted"], report["completed"]) == (True, 3)
    assert b"Interrupted" in errors
    assert process.returncode == 130
