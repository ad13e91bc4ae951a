"""Print the table of models and PCs, from data sheets and the product's placement.

Usage: ``python -m tools.fit_table``.
"""

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


def format_devices(devices: tuple[str, ...]) -> str:
    """Format devices, such as ``2 x rtx3060``."""
    return ", ".join(f"{devices.count(one)} x {one}" for one in dict.fromkeys(devices))


def main() -> None:
    """Print the table as Markdown."""
    print(f"| PCs | {' | '.join(MODELS)} |")
    print(f"|---|{'---|' * len(MODELS)}")
    for devices in SWARMS:
        cells = " | ".join(format_cell(devices, model) for model in MODELS)
        print(f"| {format_devices(devices)} | {cells} |")


if __name__ == "__main__":
    main()
