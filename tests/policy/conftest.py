"""A policy that is right, for tests to change."""

from __future__ import annotations

import pytest

GOOD = """\
apiVersion: controld/v1
kind: Policy
metadata: {name: chat-fleet}
select: {kind: sglang, deployment: chat}
links: {default: {rate: 10Gbit}}
tenants:
  - {name: acme, weight: 3}
  - {name: default, weight: 1}
classes:
  - name: chat
    tenant: acme
    match: {extra_key: "class=chat"}
    workload: dialogue
    tiers: [pd, prefix_store]
    slo: {ttft: 300ms, percentile: 90}
    max_quality_loss_nats: 0.02
    explore: 2%
  - name: default
    workload: general
    tiers: [pd, prefix_store]
guard: {sample: 1%, on_breach: pin_off}
"""


@pytest.fixture
def good() -> str:
    return GOOD
