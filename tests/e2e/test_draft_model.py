"""`molink up --draft-model`, as people type it."""

from pathlib import Path

import pytest

from tests.support.models import MakeModel
from tests.support.processes import Tools, local_options, run_molink


def test_a_model_of_other_tokens_is_refused_before_anything_starts(
    tmp_path: Path, make_model: MakeModel
) -> None:
    folder = make_model(tmp_path / "model")
    options = [*local_options(), "--coordinator-port", "0", "--model", str(folder)]
    ended = run_molink(tmp_path / "home", "up", *options, "--draft-model", "molink-demo")
    assert ended.returncode == 2
    assert "--draft-model molink-demo has a different vocabulary" in ended.stderr
    assert "join molink-" not in ended.stdout


@pytest.mark.slow
def test_the_bundled_model_drafts_for_itself(tmp_path: Path, tools: type[Tools]) -> None:
    options = [*local_options(), "--coordinator-port", "0", "--draft-model", "molink-demo"]
    process = tools.Process(
        tmp_path / "home", ["up", *options], variables={"MOLINK_NUM_SPECULATIVE_TOKENS": "3"}
    )
    try:
        status = process.wait_ready()
        endpoint = process.found().endpoints[0]
        with tools.client(endpoint) as client:
            answer = client.chat.completions.create(
                model=status["model"],
                messages=[{"role": "user", "content": "What is molink?"}],
                temperature=0,
                max_tokens=48,
            )
        assert answer.choices[0].message.content
        # A worker reports its counters a little later.
        for name in ("draft_tokens", "draft_tokens_accepted"):
            counted = f"molink_scheduler_{name}_total"
            tools.wait_for(lambda at=counted: tools.metrics(endpoint)[at] > 10, process)
    finally:
        process.stop()
