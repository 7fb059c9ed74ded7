"""Keys that only one kind of plane has: a target that its planes cannot know is refused, not ignored."""

from __future__ import annotations

from controld.policy.model import Objective, PlaneKind
from controld.policy.settings import Path, Reading
from controld.policy.strict_yaml import Scalar, Sequence, Table

_KV_CLASS_KEYS = {
    "max_quality_loss_nats": "write max_quality_loss: error above the reference setting's, in the profiles' unit",
    "slo": "write video: {fps: 24, first_frame: 2s}",
    "explore": "an engine has one setting at a time: nothing is tried on the side",
    "learn": "chunks always teach: each one is measured anyway",
}
_LINK_TENANT_KEYS = ("share", "quota")
_VIDEO_CLASS_KEYS = {
    "max_quality_loss": "write max_quality_loss_nats: mean KL per token",
    "video": "write slo: {ttft: 300ms}",
}
_VIDEO_GUARD_KEYS = ("drift", "motion")


def check_kind(reading: Reading) -> None:
    """Note keys that the selected kind of planes does not have."""
    root = reading.root
    select = root.get("select") if root else None
    kind = select.get("kind") if isinstance(select, Table) else None
    if root is None or not isinstance(kind, Scalar) or kind.value not in list(PlaneKind):
        return
    is_video = kind.value == PlaneKind.LONGLIVE
    if is_video:
        _check_links(reading, root)
    classes = root.get("classes")
    for index, row in enumerate(classes.items if isinstance(classes, Sequence) else ()):
        if isinstance(row, Table):
            _check_class(reading, ("classes", index), row, is_video)
    guard = root.get("guard")
    if isinstance(guard, Table) and not is_video:
        for key in _VIDEO_GUARD_KEYS:
            _refuse(reading, ("guard", key), guard, "a transfer has no frames", PlaneKind.SGLANG)
    if is_video and isinstance(guard, Table):
        hint = "write drift: 0.5, motion: 70%"
        _refuse(reading, ("guard", "sample"), guard, hint, PlaneKind.LONGLIVE)


def _check_links(reading: Reading, root: Table) -> None:
    """Engines share no link, so there is none to describe and none to have a part of."""
    _refuse(reading, ("links",), root, "leave it out: frames cross no link that is shared", PlaneKind.LONGLIVE)
    tenants = root.get("tenants")
    for index, row in enumerate(tenants.items if isinstance(tenants, Sequence) else ()):
        if not isinstance(row, Table):
            continue
        for key in _LINK_TENANT_KEYS:
            _refuse(reading, ("tenants", index, key), row, "leave it out: it is a part of a link", PlaneKind.LONGLIVE)


def _check_class(reading: Reading, path: Path, row: Table, is_video: bool) -> None:
    kind = PlaneKind.LONGLIVE if is_video else PlaneKind.SGLANG
    for key, hint in (_KV_CLASS_KEYS if is_video else _VIDEO_CLASS_KEYS).items():
        _refuse(reading, (*path, key), row, hint, kind)
    if not is_video:
        return
    objective, pin = row.get("objective"), row.get("pin")
    if isinstance(objective, Scalar) and objective.value == Objective.ENERGY:
        reading.add((*path, "objective"), "an engine's energy is not known", "quality, latency or bytes (of memory)")
    if isinstance(pin, Scalar) and pin.value == "raw":
        reading.add((*path, "pin"), '"raw" is no setting', "the id of a setting: controld explain --engine ID")


def _refuse(reading: Reading, path: Path, row: Table, hint: str, kind: PlaneKind) -> None:
    key = str(path[-1])
    if row.get(key) is not None:
        position = reading.position(path, of_key=True)
        reading.add(path, f"planes of kind {kind.value} have no such key", hint, position=position)
