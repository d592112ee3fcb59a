"""The objects in what `launch kubernetes` prints, and the schemas that they must keep."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

# It would read megabytes anew for each object.
utils.schema_contents, utils.all_versions = cache(utils.schema_contents), cache(utils.all_versions)

Object = dict[str, Any]
Objects = dict[tuple[str, str], Object]
"""(kind, name) -> object."""

VERSIONS = ("1.27", "1.37")
"""Of Kubernetes: the first that knows every field, and the newest with a published schema."""
_HERE = Path(__file__).parent
_SETS = yaml.safe_load((_HERE / "../tools/samples/disaggregated_set.yaml").read_text("utf-8"))
_GROUP_SPEC = _SETS["properties"]["spec"]["properties"]["roles"]["items"]["properties"]["spec"]
_CRDS = yaml.safe_load((_HERE / "routing_schemas.yaml").read_text("utf-8"))
PICKER = _CRDS.pop("EndpointPicker")


def objects(text: str) -> Objects:
    assert "@@{" not in text, "a place of a template was not filled"
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.load_all(text, Loader=yaml.CSafeLoader)}
    assert len(found) == text.count("\n---\n") + 1
    return found


def templates(spec: Object) -> list[Object]:
    """Return the pod templates of a Deployment's or group's spec; the one with tritonserver comes first."""
    if "leaderWorkerTemplate" not in spec:
        return [spec["template"]]
    group = spec["leaderWorkerTemplate"]
    return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]


def container(template: Object) -> Object:
    [only] = template["spec"]["containers"]
    return dict(only)


def environment(template: Object) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(template)["env"]}


def validate(found: Objects, *versions: str) -> None:
    """:raises jsonschema.ValidationError: for a field that is unknown or wrong, by the schemas of these versions."""
    for (kind, _), document in found.items():
        specs = []
        if kind in _CRDS:
            assert document["apiVersion"] == _CRDS[kind]["apiVersion"]
            assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
            keeps(_CRDS[kind]["spec"], document["spec"])
        elif kind == "DisaggregatedSet":
            jsonschema.Draft202012Validator(_SETS).validate(document)
            specs = [role["spec"] for role in document["spec"]["roles"]]
        elif kind == "LeaderWorkerSet":
            assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
            jsonschema.Draft202012Validator(_GROUP_SPEC).validate(document["spec"])
            specs = [document["spec"]]
        for version in versions or VERSIONS[-1:]:
            if not specs and kind not in _CRDS:
                kubernetes_validate.validate(document, version, strict=True)
            for template in (template for spec in specs for template in templates(spec)):
                spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
                wrapped = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": spec}
                kubernetes_validate.validate(wrapped, version, strict=True)


def keeps(schema: Object, value: Any) -> None:
    """:raises jsonschema.ValidationError: when `value` breaks the schema, or has a field that the schema lacks."""
    jsonschema.Draft202012Validator(_closed(schema)).validate(value)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(inner) for name, inner in schema.items()}
    return {"additionalProperties": False, **closed} if isinstance(schema.get("properties"), dict) else closed
