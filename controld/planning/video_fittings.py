"""The profiles that fit engines, found once for all engines of a kind that serve the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controld.candidates.video_profile import VideoProfile
from controld.fleet.identity import AgentIdentity
from controld.planning.known_profiles import KnownProfiles
from controld.planning.video_plane import Fitting, fitting_of

MAX_FITTINGS = 64
"""Kinds of engines, by what they serve, whose fitting profiles are kept."""


class Fittings:
    """What `fitting_of` says, remembered until there are other profiles.

    Args:
        known: the profiles to choose from.
    """

    def __init__(self, known: KnownProfiles[VideoProfile]) -> None:
        self._known = known
        self._chosen_from: tuple[VideoProfile, ...] = ()
        self._found: dict[tuple[str, ...], Fitting] = {}

    async def of(self, identity: AgentIdentity, workloads: Sequence[str]) -> Fitting:
        """The fitting of an engine that serves these workloads."""
        profiles = self._known.profiles
        if profiles is not self._chosen_from:
            self._chosen_from, self._found = profiles, {}
        key = identity.model_fingerprint, identity.hardware, identity.space_json, *workloads
        known = self._found.get(key)
        if known is not None:
            return known
        found = await asyncio.to_thread(fitting_of, profiles, identity, workloads)
        if profiles is self._chosen_from:  # else there are others by now
            if len(self._found) >= MAX_FITTINGS:
                self._found.clear()
            self._found[key] = found
        return found
