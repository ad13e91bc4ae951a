"""The dashboard in ``docs`` can be shown, and its metrics exist."""

import json
import re
from pathlib import Path

from molinkd.api.metric_help import HELP
from molinkd.api.metrics import RequestRecorder

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
_NAME = re.compile(r"molink_\w+")


def asked() -> set[str]:
    """Return all sample names in the dashboard's queries."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    texts += [str(variable["query"]) for variable in dashboard["templating"]["list"]]
    return {name for text in texts for name in _NAME.findall(text)}


def test_dashboard_metrics_exist() -> None:
    known = {f"molink_{name}" for name in HELP} | {"molink_build_info"}
    known |= {family.name for family in RequestRecorder().metric_families()}
    names = {re.sub(r"_(total|bucket)$", "", name) for name in asked()}
    families = {name for name in names if name.endswith("_")}  # part of a pattern
    assert names - families <= known
    assert all(any(name.startswith(family) for name in known) for family in families)
    assert names


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
