"""The dashboard, the alerts and the page about them name what is exported, and can be parsed."""

from __future__ import annotations

import json
import re

import pytest
from documents import ROOT, Document
from test_metrics import page, written

from expert_cache_shim import metrics

FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
OURS = re.compile(rf"\b{metrics.PREFIX}[a-z_]+")


def panels() -> list[dict]:
    return DASHBOARD["panels"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alert_rules() -> list[dict]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return group["rules"]


@pytest.fixture
def exported(tmp_path) -> dict[str, str]:
    """Every name on a page of metrics, with its type."""
    written(tmp_path)
    return {
        sample.name: family.type for family in page(tmp_path).values() for sample in family.samples
    }


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported(exported):
    texts = [*dashboard_queries(), json.dumps(DASHBOARD["templating"])]
    texts += [rule["expr"] for rule in alert_rules()]
    texts += [rule["annotations"]["description"] for rule in alert_rules()]
    named = {name for text in texts for name in OURS.findall(text)}
    assert named <= exported.keys()
    assert len(named) > 10


def test_the_page_lists_what_is_exported_with_its_type(exported):
    rows = [row for row in Document(ROOT / "docs" / "monitoring.md").rows if len(row) == 3]
    listed = {row[0].strip("`"): row[1] for row in rows if OURS.match(row[0].strip("`"))}
    assert listed == exported


def test_counters_are_only_asked_for_their_rate():
    for query in dashboard_queries():
        counters = len(re.findall(r"_total\b", query))
        assert (
            len(re.findall(r"rate\([a-z_:]+_total(\{[^}]*\})?\[\$__rate_interval\]\)", query))
            == counters
        )


def test_queries_are_promql():
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    examples = Document(ROOT / "docs" / "monitoring.md").blocks("promql")
    queries = [query.replace("$__rate_interval", "5m") for query in dashboard_queries()]
    queries += [rule["expr"] for rule in alert_rules()]
    queries += [text for text in re.split(r"^#.*\n", examples[0], flags=re.M) if text]
    for query in queries:
        parser.parse(query)
    with pytest.raises(ValueError):
        parser.parse("sum by (model rate(")


def test_panels_lie_side_by_side_and_do_not_overlap():
    taken = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_has_what_an_import_needs():
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD.get("id") is None  # given by the Grafana that imports it
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model", "rank"}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["type"] in ("stat", "timeseries", "bargauge")
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = {name for query in dashboard_queries() for name in re.findall(r"\$(\w+)", query)}
    assert used == {"model", "rank", "__rate_interval"}


def test_an_alert_says_what_it_means():
    names = [rule["alert"] for rule in alert_rules()]
    assert "ExpertCacheArmedButIdle" in names and len(set(names)) == len(names)
    for rule in alert_rules():
        assert rule["for"] and rule["labels"]["severity"]
        assert rule["annotations"].keys() == {"summary", "description"}
