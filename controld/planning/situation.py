"""What a policy is planned from, as its planes and the stored profiles are at a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.contract.snapshot import CalibratedArtefact
from controld.fleet.session import AgentSession
from controld.planning.artefacts import ArtefactFolder
from controld.planning.plane import (
    LINK_GROUP,
    Place,
    artefact_of,
    observe_place,
    profiles_for,
    ready_profiles,
    tiers_of,
)
from controld.planning.sharing import offered_shares
from controld.policy.model import Policy

Shares = Mapping[str, Mapping[str, float]]
"""By tier the parts of the offered bytes by class; empty where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What one policy is planned from at a moment, beside what was learned.

    Args:
        place: the model and the hardware.
        measured: the policy's profiles of that place; `profiles` are those of them that may be sent now.
        artefacts: calibrated artefacts that agents are to get.
        waiting: whether profiles wait for an artefact.
        alarm: what the operator should know; empty where all is well.
        shares: of the offered bytes.
    """

    place: Place
    measured: list[Profile]
    profiles: list[Profile]
    artefacts: Mapping[str, CalibratedArtefact]
    waiting: bool
    alarm: str
    shares: Shares


async def observe_situation(
    policy: Policy,
    sessions: Sequence[AgentSession],
    stored: Sequence[Profile],
    folder: ArtefactFolder,
    *,
    place: Place,
    shares: Shares,
) -> Situation:
    """What there is to plan from for a policy.

    Args:
        sessions: of the policy's planes.
        stored: profiles of any place.
        folder: where artefacts are looked up.
        place, shares: as they were known before; what agents say nothing of stays.
    """
    place, alarm = observe_place(place, [session.identity for session in sessions])
    measured = profiles_for(policy, place, stored)
    artefacts = await asyncio.to_thread(folder.find, {artefact_of(one) for one in measured} - {""}, place)
    profiles, waiting = ready_profiles(measured, sessions, artefacts)
    known = {RAW, *(profile.arm_id for profile in measured)}
    unknown = [c.name for c in policy.classes if c.pin is not None and c.pin not in known]
    if unknown and not alarm:
        alarm = f"classes without a profile of their pinned arm stay raw: {', '.join(unknown)}"
    nowhere = waiting - artefacts.keys()
    if nowhere and sessions and not alarm:
        alarm = f"calibrated artefacts are neither here nor on every agent: {', '.join(sorted(nowhere))}"
    return Situation(
        place=place, measured=measured, profiles=profiles, artefacts=artefacts, waiting=bool(waiting), alarm=alarm,
        shares=_observe_shares(policy, sessions, shares),
    )  # fmt: skip


def _observe_shares(policy: Policy, sessions: Sequence[AgentSession], before: Shares) -> Shares:
    found = {}
    for tier in tiers_of(policy):
        links = [
            link
            for session in sessions
            if session.connected and session.telemetry is not None
            for link in session.telemetry.links
            if (link.tier, link.link_group) == (tier.value, LINK_GROUP)
        ]
        found[tier.value] = offered_shares(policy, links, before.get(tier.value, {}))
    return found
