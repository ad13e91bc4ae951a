"""Short names of the catalog, with a local hub: search, run, and a refusal before the download."""

import json
from pathlib import Path

from tests.support.fake_hub import serving
from tests.support.models import MakeModel
from tests.support.processes import Process, Tools

SOURCE = "HuggingFaceTB/SmolLM2-360M-Instruct"


def test_a_model_is_run_by_its_short_name(
    tmp_path: Path, tools: type[Tools], make_model: MakeModel
) -> None:
    home = tmp_path / "home"
    options = tools.local_options("--dtype", "f32", "--coordinator-port", "0")
    with serving(make_model(tmp_path / "model", "llama", 1), SOURCE) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        process = Process(home, ["up", *options], variables=variables)
        try:
            process.wait_ready()
            found = json.loads(tools.run_molink(home, "search", "smollm2:360m", "--json").stdout)
            assert [(one["name"], one["fits"]) for one in found] == [("smollm2:360m", True)]
            assert found[0]["tokens_per_s"] > 0

            refused = tools.run_molink(home, "run", "deepseek-v3.1", "Hello?")
            assert refused.returncode == 2, refused.stderr
            assert "deepseek-v3.1:671b-a37b needs" in refused.stderr
            assert hub.asked == []

            ran = tools.run_molink(home, "run", "smollm2:360m", "Hello?")
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout.strip()
            assert hub.asked
            client = tools.client(process.found().endpoints[0])
            for name in ("smollm2:360m", "SmolLM2-360M-Instruct"):
                made = client.completions.create(model=name, prompt="x", max_tokens=2)
                assert made.choices[0].text is not None
            stopped = tools.run_molink(home, "stop", "smollm2:360m", "--yes")
            assert "Unloaded SmolLM2-360M-Instruct" in stopped.stdout
        finally:
            tools.close_clients()
            process.stop()
