"""DisaggregatedParams, with the recorded fields; None where the release has none."""

import dataclasses

from tensorrt_llm._record import RECORD


def _validate(self):
    """Make the check of 1.2.1's DisaggregatedParams.__post_init__."""
    if self.request_type is None:
        return
    self.request_type = self.request_type.lower()
    known = RECORD["disaggregated_params"]["request_types"]
    if self.request_type not in known:
        raise ValueError(f"Unknown request type: {self.request_type}. Must be one of {', '.join(known)}")


DisaggregatedParams = None
if "disaggregated_params" in RECORD:
    DisaggregatedParams = dataclasses.make_dataclass(
        "DisaggregatedParams",
        [(name, "Any", None) for name in RECORD["disaggregated_params"]["fields"]],
        kw_only=True,
        slots=True,
        namespace={"__post_init__": _validate},
    )
