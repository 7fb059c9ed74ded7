"""Which part of a link's load each class offers, from what the agents report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from controld.contract.telemetry import LinkEstimate
from controld.policy.model import Policy

SHARE_STEP: Final = 0.05
"""Shares are told in such steps, and one that moved by less than a step stays: small news make no new table."""


def offered_shares(policy: Policy, links: Iterable[LinkEstimate], before: Mapping[str, float]) -> dict[str, float]:
    """Parts of the offered raw bytes by class, in steps of `SHARE_STEP` and none below one step.

    A class that offers nothing now may do so any moment, so it is never counted for nothing. While nobody offers
    anything, what was known stays.

    Args:
        links: one tier and link group as each of its agents sees it.
        before: what was returned last; empty at first.

    Returns:
        Empty where it does not matter, because the classes are of one tenant, or where nobody has told.
    """
    names = {service_class.name for service_class in policy.classes}
    if len({service_class.tenant for service_class in policy.classes}) < 2:
        return {}
    offered = dict.fromkeys(sorted(names), 0.0)
    for link in links:
        for name, bytes_per_s in link.offered_by_class_bytes_per_s.items():
            if name in names:
                offered[name] += bytes_per_s
    total = sum(offered.values())
    if total <= 0:
        return dict(before) if before.keys() == names else {}
    shares = {}
    for name, bytes_per_s in offered.items():
        share = bytes_per_s / total
        known = before.get(name)
        stays = known is not None and abs(known - share) <= SHARE_STEP
        shares[name] = known if stays and known is not None else max(SHARE_STEP, round(share / SHARE_STEP) * SHARE_STEP)
    return shares
