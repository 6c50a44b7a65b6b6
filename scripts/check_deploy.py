"""Checks that deploy/ matches the program and the guide, which no other tool does.

Writes the expressions of the dashboard as rules for `promtool check rules`, and the dashboard as a TypeScript
program for `tsc`, into the folder given as argument.
"""

import json
import pathlib
import re
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDE = "https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/"
# Labels that Prometheus adds to each series.
TARGET_LABELS = {"job", "instance"}
SEVERITIES = {"critical", "warning", "info"}

failures = []


def fail(words):
    failures.append(words)


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def documents(path):
    return list(yaml.safe_load_all(read(path)))


def metrics_of_the_guide():
    """The labels of each metric, from the table in docs/watch.md."""
    metrics = {}
    rows = re.findall(r"^\| `(diesel_outbox_\w+)` \|([^|]*)\| ([^|]*)", read("docs/watch.md"), re.M)
    for name, labels, meaning in rows:
        own = set(re.findall(r"[a-z]+", labels.split("(")[0]))
        names = [name]
        if meaning.startswith("histogram"):
            names = [f"{name}_{part}" for part in ("bucket", "sum", "count")]
            own.add("le")
        for each in names:
            metrics[each] = own | ({"outbox"} if "no outbox" not in labels else set())
    return metrics


def check_that_the_guide_has_all_metrics(metrics):
    known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics}
    in_code = set(re.findall(r'"(diesel_outbox_\w+)"', read("src/metrics.rs")))
    for name in sorted(in_code ^ known):
        fail(f"{name} is only in one of src/metrics.rs and docs/watch.md")


def check_expression(where, expression, metrics):
    """Checks that each metric exists, and has the labels of its matchers and groupings."""
    names = re.findall(r"diesel_outbox_\w+", expression)
    if not names:
        fail(f"{where}: no metric in {expression}")
    for name in names:
        if name not in metrics:
            fail(f"{where}: the metric {name} does not exist")
    for name, matchers in re.findall(r"(diesel_outbox_\w+)\s*\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            if label not in metrics.get(name, set()) | TARGET_LABELS:
                fail(f"{where}: {name} has no label {label}")
    every = [metrics.get(name, set()) | TARGET_LABELS for name in names]
    for labels in re.findall(r"\bby\s*\(([^)]*)\)", expression):
        for label in re.findall(r"\w+", labels):
            if not any(label in has for has in every):
                fail(f"{where}: no metric has the label {label}, used in by ({labels})")


def anchors_of(page):
    headings = re.findall(r"^#+ (.*)$", read(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def problems_of_the_guide():
    part = read("docs/problems.md").split("\n## Problems\n")[1].split("\n## ")[0]
    return set(re.findall(r"^### (\w+)$", part, re.M))


def check_problems():
    in_code = set(re.findall(r'^        [A-Z]\w+ = "(\w+)",$', read("src/engine/observe/health.rs"), re.M))
    for name in sorted(in_code ^ problems_of_the_guide()):
        fail(f"the problem {name} is only in one of src/engine/observe/health.rs and docs/problems.md")


def check_alerts(metrics):
    [rules] = documents("deploy/prometheus/diesel-outbox.rules.yml")
    tests = read("deploy/prometheus/tests.yml")
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    for alert in alerts:
        name = alert["alert"]
        check_expression(name, alert["expr"], metrics)
        if alert["labels"]["severity"] not in SEVERITIES:
            fail(f"{name}: unknown severity {alert['labels']['severity']}")
        notes = alert["annotations"]
        for what in ("summary", "description", "runbook_url"):
            if not notes.get(what):
                fail(f"{name}: {what} is missing")
        url, _, anchor = notes["runbook_url"].partition("#")
        page = f"docs/{url.removeprefix(GUIDE)}"
        if not url.startswith(GUIDE) or not (ROOT / page).is_file():
            fail(f"{name}: {url} is not in the guide")
            continue
        # The name of the problem is the anchor.
        of_problem = page == "docs/problems.md" and anchor == "{{ $labels.problem }}"
        if not of_problem and anchor not in anchors_of(page):
            fail(f"{name}: {page} has no heading {anchor}")
        for part in {page, "docs/problems.md"}:
            if f"`{name}`" not in read(part):
                fail(f"{name} is not in {part}")
        short = name.removeprefix("DieselOutbox")
        for claim in (f"{short} fires", f"{short} is silent"):
            if not re.search(rf"name: '?{claim}\b", tests):
                fail(f"{name}: the test '{claim}' is missing")


def panels_of(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions_of(dashboard):
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def check_dashboard(dashboard, metrics, work):
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    rules = []
    for title, expression, legend in expressions_of(dashboard):
        check_expression(title, expression, metrics)
        for name in re.findall(r"\$\{?(\w+)", expression):
            if name not in variables and not name.startswith("__"):
                fail(f"{title}: the variable {name} does not exist")
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            if not re.search(rf"by\s*\([^)]*\b{label}\b", expression):
                fail(f"{title}: the legend uses {label}, but the expression does not group by it")
        plain = re.sub(r"\$__\w+", "5m", expression)
        rules.append({"record": f"expression:{len(rules)}", "expr": plain})
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            check_expression(variable["name"], variable["query"]["query"], metrics)
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(ids) != len(set(ids)):
        fail("two panels of the dashboard have the same id")
    check_that_panels_do_not_overlap(dashboard)
    groups = {"groups": [{"name": "dashboard", "rules": rules}]}
    (work / "expressions.yml").write_text(json.dumps(groups), encoding="utf-8")


def check_that_panels_do_not_overlap(dashboard):
    taken = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                if x >= 24 or (x, y) in taken:
                    fail(f"{panel['title']} overlaps {taken.get((x, y), 'the border')}")
                    return
                taken[(x, y)] = panel["title"]


# The types of Grafana for the options of a panel, by the type of the panel.
PANEL_TYPES = {
    "timeseries": ("timeseries", "TimeSeriesPanelCfg"),
    "stat": ("stat", "StatPanelCfg"),
    "state-timeline": ("statetimeline", "StateTimelinePanelCfg"),
}

# The types with enums replaced by their JSON values.
TYPESCRIPT = """
import type {Dashboard, FieldConfig, FieldConfigSource, Panel} from '@grafana/schema';
type Plain<T> = T extends string ? `${T}`
  : T extends boolean | number | null | undefined ? T
  : T extends Array<infer U> ? Plain<U>[]
  : T extends object ? {[K in keyof T]: Plain<T[K]>} : T;
type Known<Type, Options, Custom> = Omit<Panel, 'type' | 'options' | 'fieldConfig'> & {
  type: Type; options: Options;
  fieldConfig: Omit<FieldConfigSource, 'defaults'> & {
    defaults: Omit<FieldConfig, 'custom'> & {custom?: Custom}
  }
};
"""


def write_typescript(dashboard, work):
    lines = [TYPESCRIPT]
    for kind, (folder, name) in PANEL_TYPES.items():
        path = f"@grafana/schema/dist/esm/raw/composable/{folder}/panelcfg/x/{name}_types.gen"
        lines.append(f"import type * as {folder} from '{path}';")
    for panel in panels_of(dashboard):
        folder, _ = PANEL_TYPES[panel["type"]]
        custom = f"{folder}.FieldConfig" if "custom" in panel["fieldConfig"]["defaults"] else "never"
        kind = f"Plain<Known<'{panel['type']}', {folder}.Options, {custom}>>"
        lines.append(f"export const panel_{panel['id']}: {kind} = {json.dumps(panel, indent=1)};")
    lines.append(f"export const dashboard: Plain<Dashboard> = {json.dumps(dashboard, indent=1)};")
    (work / "dashboard.ts").write_text("\n".join(lines), encoding="utf-8")


def check_settings():
    """Checks that deployment files name only existing settings."""
    known = set(re.findall(r'"((?:OUTBOX|DATABASE)_[A-Z_]+)"', read("src/config/settings.rs")))
    for path in ("deploy/systemd/diesel-outbox.service", "deploy/kubernetes/diesel-outbox.yaml"):
        for name in re.findall(r"\b(?:OUTBOX|DATABASE_URL)[A-Z_]*", read(path)):
            if name not in known and name.removesuffix("_FILE") not in known:
                fail(f"{path}: the setting {name} does not exist")


def check_manifest():
    """Checks the Pod Security Standard `restricted`, and a few more rules."""
    things = {thing["kind"]: thing for thing in documents("deploy/kubernetes/diesel-outbox.yaml")}
    pod = things["Deployment"]["spec"]["template"]["spec"]
    if not pod["securityContext"]["runAsNonRoot"]:
        fail("the pod may run as root")
    if pod["securityContext"]["seccompProfile"]["type"] != "RuntimeDefault":
        fail("the pod has no seccomp profile")
    for container in pod["containers"] + pod["initContainers"]:
        security = container["securityContext"]
        if security["allowPrivilegeEscalation"] or not security["readOnlyRootFilesystem"]:
            fail(f"{container['name']} has too many privileges")
        if security["capabilities"] != {"drop": ["ALL"]}:
            fail(f"{container['name']} has capabilities")
        if "memory" not in container["resources"]["limits"]:
            fail(f"{container['name']} has no memory limit")
        if any("value" not in variable for variable in container["env"]):
            fail(f"{container['name']} has a secret in its environment")
    [relay] = pod["containers"]
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        if relay[probe]["httpGet"]["path"] != path:
            fail(f"{probe} does not use {path}")
    labels = things["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        things["Deployment"]["spec"]["selector"]["matchLabels"],
        things["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        things["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        things["Service"]["spec"]["selector"],
    ]
    if any(selector != labels for selector in selectors):
        fail("a selector does not match the labels of the pod")
    check_grace(pod["terminationGracePeriodSeconds"], "terminationGracePeriodSeconds")


def check_grace(seconds, name):
    [default] = re.findall(r"^\| `OUTBOX_SHUTDOWN_TIMEOUT` \| `(\d+)s`", read("docs/settings.md"), re.M)
    if seconds <= int(default):
        fail(f"{name} is not longer than OUTBOX_SHUTDOWN_TIMEOUT")


def main():
    work = pathlib.Path(sys.argv[1])
    metrics = metrics_of_the_guide()
    check_that_the_guide_has_all_metrics(metrics)
    check_problems()
    check_alerts(metrics)
    dashboard = json.loads(read("deploy/grafana/diesel-outbox.json"))
    check_dashboard(dashboard, metrics, work)
    write_typescript(dashboard, work)
    check_settings()
    check_manifest()
    unit = read("deploy/systemd/diesel-outbox.service")
    check_grace(int(re.findall(r"^TimeoutStopSec=(\d+)s$", unit, re.M)[0]), "TimeoutStopSec")
    for failure in failures:
        print(failure)
    sys.exit(1 if failures else 0)


main()
