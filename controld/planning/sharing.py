"""Which part of a link's load each class offers, from what the agents report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from controld.contract.telemetry import LinkEstimate
from controld.policy.model import Policy

SHARE_STEP: Final = 0.05
"""While no class's share moved by more than this, what was told stays: small news make no new table."""


def offered_shares(policy: Policy, links: Iterable[LinkEstimate], before: Mapping[str, float]) -> dict[str, float]:
    """Parts of the offered raw bytes by class; they sum to one.

    A class that offers nothing now may do so any moment, so it is never counted for nothing: all classes together have
    at least `SHARE_STEP`, evenly. While nobody offers anything, what was known stays.

    Args:
        links: one tier and link group as each of its agents sees it.
        before: what was returned last; empty at first.

    Returns:
        Empty where it does not matter, because there is one class, or where nobody has told.
    """
    names = {service_class.name for service_class in policy.classes}
    if len(names) < 2:
        return {}
    offered = dict.fromkeys(sorted(names), 0.0)
    for link in links:
        for name, bytes_per_s in link.offered_by_class_bytes_per_s.items():
            if name in names:
                offered[name] += bytes_per_s
    total = sum(offered.values())
    if total <= 0:
        return dict(before) if before.keys() == names else {}
    shares = {
        name: (1 - SHARE_STEP) * bytes_per_s / total + SHARE_STEP / len(offered)
        for name, bytes_per_s in offered.items()
    }
    stays = before.keys() == names and all(abs(before[name] - share) <= SHARE_STEP for name, share in shares.items())
    return dict(before) if stays else shares
