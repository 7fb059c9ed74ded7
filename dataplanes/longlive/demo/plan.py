"""What happens in the demo, and the policy: derived from what was just measured, for a toy engine has no usual rate."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from controld.contract.errors import FieldError

DEPLOYMENT: Final = "video"
AGENT_ID: Final = "video-0"
SERVICE_CLASS: Final = "live"

TARGET_SHARE: Final = 0.55
"""The target is this part of what the full setting gives one session: enough for one, too much for two."""

SETTLE_SHARE: Final = 0.5
"""A phase is judged over its last part; the first is for noticing and changing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of time.

    Args:
        sessions: names of the sessions that are open in it.
        memory_limit_bytes: what the engine may use; 0: no limit.
        must_change: what happens in it cannot be met by the setting of the phase before.
    """

    name: str
    seconds: float
    sessions: tuple[str, ...]
    memory_limit_bytes: int = 0
    must_change: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """One run.

    Args:
        address: of the daemon.
        checkpoint: of the engine.
        target_fps: for each session, end to end.
        max_quality_loss: of the policy.
    """

    address: str
    checkpoint: str
    target_fps: float
    max_quality_loss: float
    phases: tuple[Phase, ...]

    def to_json(self) -> str:
        """For the engine's process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoPlan:
        """The inverse."""
        values: dict[str, Any] = json.loads(text)
        phases = tuple(Phase(**{**phase, "sessions": tuple(phase["sessions"])}) for phase in values.pop("phases"))
        return cls(**values, phases=phases)


def make_plan(
    profiles: Sequence[Mapping[str, Any]], *, address: str, checkpoint: str, fps_of_one: float, phase_s: float
) -> DemoPlan:
    """The run for these profiles.

    Args:
        profiles: as the profiler wrote them, the full setting's first.
        fps_of_one: measured: frames per second of one session under the full setting.
        phase_s: seconds of a phase; the last one takes half as long again, for recovering takes longer.

    Raises:
        FieldError: no setting needs less memory than the full one.
    """
    full, usable = profiles[0], [each for each in profiles if each["configuration"]["steps"] >= 2]
    limit = max(each["loss_mean"] + 3 * each["loss_se"] for each in usable)
    needed = [_bytes(each, 2) for each in usable]
    if min(needed) >= _bytes(full, 2):
        raise FieldError("profiles", "no setting needs less memory than the full one")
    shrunk = math.ceil((min(needed) + _bytes(full, 2)) / 2)
    return DemoPlan(
        address=address,
        checkpoint=checkpoint,
        target_fps=round(TARGET_SHARE * fps_of_one, 1),
        max_quality_loss=float(f"{max(limit, 1e-6) * 1.05:.4g}"),
        phases=(
            Phase(name="one stream", seconds=phase_s, sessions=("a",)),
            Phase(name="a second stream", seconds=phase_s, sessions=("a", "b"), must_change=True),
            # What the second stream led to may fit already: windows hardly differ in loss.
            Phase(name="memory shrinks", seconds=phase_s, sessions=("a", "b"), memory_limit_bytes=shrunk),
            Phase(name="all is well again", seconds=1.5 * phase_s, sessions=("a",)),
        ),
    )


def _bytes(profile: Mapping[str, Any], sessions: int) -> int:
    memory = profile["memory"]
    one = memory["weights_bytes"] + memory["kv_bytes"] + memory["activation_bytes"]
    return int(one + (sessions - 1) * (memory["kv_bytes"] + memory["session_bytes"]))


PROFILING_POLICY: Final = f"""\
apiVersion: controld/v1
kind: Policy
metadata: {{name: video-demo}}
select: {{kind: longlive, deployment: {DEPLOYMENT}}}
classes:
  - {{name: default, workload: shapes, tiers: [video], max_quality_loss: 0}}
"""
"""While settings are measured there is no engine to steer, and no target yet."""


def policy_text(plan: DemoPlan) -> str:
    """The policy of the run."""
    return f"""\
apiVersion: controld/v1
kind: Policy
metadata: {{name: video-demo}}
select: {{kind: longlive, deployment: {DEPLOYMENT}}}
classes:
  - name: {SERVICE_CLASS}
    match: {{extra_key: "class={SERVICE_CLASS}"}}
    workload: shapes
    tiers: [video]
    max_quality_loss: {plan.max_quality_loss}
    video: {{fps: {plan.target_fps}, percentile: 60}}
  - {{name: default, workload: shapes, tiers: [video], max_quality_loss: {plan.max_quality_loss}}}
"""
