"""Print the tables of models and PCs, from data sheets and the product's placement.

Usage: ``python -m tools.fit_table``.
"""

from molink.checkpoint.hub_catalog import load_catalog
from molink.errors import UsageError
from molink.sim.model_description import ModelDescription
from molink.sim.profiles import LinkProfile
from molink.sim.swarm_plan import least_quantized, plan_swarm
from molink.swarm.placement.placement import PlacementGoal

#: Devices, one per PC.
SWARMS = (
    ("rtx4060",),
    ("rtx3060",),
    ("rtx4060", "rtx3060"),
    ("rtx3060", "rtx3060"),
    ("rtx3090",),
    ("rtx3060", "rtx3090"),
    ("rtx3090", "rtx3090"),
    ("rtx3060", "rtx3060", "rtx3060", "rtx3060"),
    ("rtx3090", "rtx3090", "rtx3090", "rtx4090"),
    ("rtx5090", "rtx5090", "rtx4090"),
)
MODELS = ("qwen-7b", "llama-3-8b", "llama-2-13b", "qwen2.5-32b")
#: Each link, in Mbps and ms one way.
LINKS = (LinkProfile(1000, 1), LinkProfile(100, 10))

#: Models that few cards hold alone, by their short names, and cards, one per PC.
LARGE_MODELS = (
    "gpt-oss:20b",
    "qwen3.5:35b-a3b",
    "qwen3-next:80b-a3b",
    "glm4.5:106b-a12b",
    "qwen3.5:122b-a10b",
    "gpt-oss:120b",
)
CARDS = ("rtx3060", "rtx4060ti-16gb", "rtx3090", "rtx4090", "rtx5090")
#: The links of ``LARGE_MODELS``; the second is the default of `molink plan`.
LARGE_LINKS = (LinkProfile(1000, 1), LinkProfile(100, 30))
#: More PCs are not tried.
_MAX_PCS = 16


def format_cell(devices: tuple[str, ...], model: str) -> str:
    """Tokens/s of one stream on each of ``LINKS``, or the quantization that fits."""
    described, figures = ModelDescription.from_profile(model), []
    for link in LINKS:
        try:
            planned = plan_swarm(
                described,
                devices,
                link,
                PlacementGoal("latency", 1),
                streams=1,
                prompt_tokens=512,
                output_tokens=32,
            )
        except UsageError:
            mode = least_quantized(described, devices)
            return f"with {mode}" if mode else "-"
        figures.append(f"{1 / planned.forecast.tpot_s:.0f}")
        room = min(stage.kv_tokens for stage in planned.stages)
    return f"{' / '.join(figures)} ({room // 1000 or '< 1'}k)"


def format_fewest(card: str, name: str) -> str:
    """The fewest PCs with ``card`` that hold a model of the catalog.

    Then tokens/s of one stream on each of ``LARGE_LINKS``.
    """
    entry = load_catalog().find_entry(name)
    assert entry is not None, name
    described = ModelDescription.from_catalog(entry)
    for count in range(1, _MAX_PCS + 1):
        try:
            rates = [
                1
                / plan_swarm(
                    described,
                    (card,) * count,
                    link,
                    PlacementGoal("latency", count),
                    streams=8,
                    prompt_tokens=512,
                    output_tokens=32,
                ).forecast.tpot_s
                for link in LARGE_LINKS
            ]
        except UsageError:
            continue
        return f"{count}: {' / '.join(f'{rate:.{int(rate < 9.95)}f}' for rate in rates)}"
    return "-"


def format_devices(devices: tuple[str, ...]) -> str:
    """Format devices, such as ``2 x rtx3060``."""
    return ", ".join(f"{devices.count(one)} x {one}" for one in dict.fromkeys(devices))


def main() -> None:
    """Print both tables as Markdown."""
    print(f"| PCs | {' | '.join(MODELS)} |")
    print(f"|---|{'---|' * len(MODELS)}")
    for devices in SWARMS:
        cells = " | ".join(format_cell(devices, model) for model in MODELS)
        print(f"| {format_devices(devices)} | {cells} |")
    print(f"\n| model | {' | '.join(CARDS)} |")
    print(f"|---|{'---|' * len(CARDS)}")
    for name in LARGE_MODELS:
        print(f"| {name} | {' | '.join(format_fewest(card, name) for card in CARDS)} |")


if __name__ == "__main__":
    main()
