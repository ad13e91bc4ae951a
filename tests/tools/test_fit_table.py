"""The documents' tables of PCs and models are up to date."""

from pathlib import Path

from molink.sim.model_description import ModelDescription
from molink.sim.swarm_plan import least_quantized
from tools import fit_table


def test_plan_picks_mildest_quantization_that_fits() -> None:
    model = ModelDescription.from_profile("llama-3-8b")
    assert least_quantized(model, ["rtx3090"]) == "none"
    assert least_quantized(model, ["rtx3060"]) == "int8"
    assert least_quantized(ModelDescription.from_profile("llama-2-13b"), ["rtx3060"]) == "nf4"
    assert least_quantized(model, ["rtx4060"]) is None


def test_the_documents_have_the_tables() -> None:
    hardware = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
    text = hardware.read_text(encoding="utf-8")
    devices = ("rtx3060", "rtx3060")
    cells = [fit_table.format_cell(devices, model) for model in fit_table.MODELS]
    assert f"| {fit_table.format_devices(devices)} | {' | '.join(cells)} |" in text
    for name in ("gpt-oss:20b", "qwen3.5:35b-a3b"):
        fewest = [fit_table.format_fewest(card, name) for card in fit_table.CARDS]
        assert f"| {name} | {' | '.join(fewest)} |" in text
