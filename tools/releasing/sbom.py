"""The SBOM of a release: what the pinned requirements install, as CycloneDX 1.6 in JSON."""

from __future__ import annotations

import json
import re
import uuid
from datetime import datetime, timezone

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)(?: *; *([^\\]+?))? *\\?$", re.MULTILINE)


def pins(requirements: str) -> list[tuple[str, str, str]]:
    """Return name, version and marker ("" for none) of each pinned requirement."""
    return [(name.lower(), version, marker) for name, version, marker in _PINNED.findall(requirements)]


def sbom(requirements: str, *, version: str, epoch: int) -> str:
    """Return the document. It depends on the arguments only, so that two people get the same.

    :param epoch: seconds since 1970, the time of the document.
    """
    own = f"pkg:pypi/deepseek-triton@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": (purl := f"pkg:pypi/{name}@{pinned}"),
            "name": name,
            "version": pinned,
            "purl": purl,
            **({"properties": [{"name": "marker", "value": marker}]} if marker else {}),
        }
        for name, pinned, marker in pins(requirements)
    ]
    references = [str(component["bom-ref"]) for component in components]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + requirements)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "deepseek-triton",
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        # Which of them needs which is not in the requirements, so all are said to be the program's own.
        "dependencies": [{"ref": own, "dependsOn": references}, *({"ref": one} for one in references)],
    }
    return json.dumps(document, indent=2) + "\n"
