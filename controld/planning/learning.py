"""What is learned, durably: the state is a checkpoint plus every effect after it, in the order of the store.

Effects are not taken from the stream but read back from the store, by position. So a daemon that was killed reads on
from its last checkpoint and ends, effect by effect, in the very state that was lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controld.candidates.profile import Profile
from controld.contract.effect import Effect
from controld.contract.errors import FieldError
from controld.contract.trial import SegmentLoss
from controld.controller.guard import Pin, PinBoard
from controld.controller.knobs.tiers import knob_for_tier
from controld.controller.learner import NO_WORKLOADS, Feedback, Learner
from controld.controller.posterior import StageCorrection
from controld.controller.quality_guard import Look
from controld.fleet.published import Selector
from controld.planning.plane import LINK_GROUP, Place
from controld.policy.model import Tier
from controld.store.interface import Store
from controld.store.records import EffectRecord, PosteriorRecord

_FORMAT = 1
_KEY = "planning"
_BATCH = 1000
_TIERS = frozenset(tier.value for tier in Tier)

TableKey = tuple[str, str]
Learned = tuple[Mapping[str, tuple[StageCorrection, ...]], PinBoard]


@dataclass(slots=True)
class Lessons:
    """What is known and learned of the planes of one selector.

    Args:
        place: profiles are chosen by it.
        profiles: the candidates that effects are compared with.
        unlearned: classes that teach nothing.
        workloads: by service class: whose profiles judge its quality.
        agents: whose effects these are.
        learners: by (tier, link group).
    """

    place: Place = field(default_factory=Place)
    profiles: tuple[Profile, ...] = ()
    unlearned: tuple[str, ...] = ()
    workloads: Mapping[str, str] = field(default_factory=dict)
    agents: set[str] = field(default_factory=set)
    learners: dict[TableKey, Learner] = field(default_factory=dict)

    def set_candidates(
        self,
        place: Place,
        profiles: Sequence[Profile],
        unlearned: Sequence[str],
        workloads: Mapping[str, str] = NO_WORKLOADS,
    ) -> bool:
        """Compare with these from now on; whether they are others than before."""
        candidates = (place, tuple(profiles), tuple(unlearned), dict(workloads))
        if candidates == (self.place, self.profiles, self.unlearned, self.workloads):
            return False
        self.place, self.profiles, self.unlearned, self.workloads = candidates
        for learner in self.learners.values():
            self._inform(learner)
        return True

    def learner(self, tier: str, link_group: str) -> Learner:
        """The learner of a table; made on first use."""
        key = (tier, link_group)
        if key not in self.learners:
            self.learners[key] = Learner(tier, link_group, knob_for_tier(tier))
            self._inform(self.learners[key])
        return self.learners[key]

    def learned(self, now_unix_s: float) -> dict[TableKey, Learned]:
        """Corrections and pins by table."""
        return {
            key: (learner.corrections(now_unix_s), learner.pins(now_unix_s)) for key, learner in self.learners.items()
        }

    def copy(self) -> Lessons:
        """A copy that can be told of other candidates without these hearing of it."""
        return Lessons.from_document(self.to_document())

    def _inform(self, learner: Learner) -> None:
        learner.set_candidates(
            self.profiles,
            sender_hardware=self.place.sender_hardware,
            receiver_hardware=self.place.receiver_hardware,
            unlearned_classes=self.unlearned,
            workloads=self.workloads,
        )

    def to_document(self) -> dict[str, Any]:
        """JSON-ready, profiles included: a replay must compare with what was compared with then."""
        return {
            "place": self.place.to_document(),
            "profiles": [profile.to_document() for profile in self.profiles],
            "unlearned": list(self.unlearned),
            "workloads": dict(self.workloads),
            "agents": sorted(self.agents),
            "learners": [learner.to_json() for _, learner in sorted(self.learners.items())],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Lessons:
        """The inverse. Raises: FieldError."""
        lessons = cls(agents=set(document["agents"]))
        lessons.set_candidates(
            Place.from_document(document["place"]),
            [Profile.from_document(item) for item in document["profiles"]],
            document["unlearned"],
            # A checkpoint of before the guard has none; the next plan names them.
            document.get("workloads", {}),
        )
        for text in document["learners"]:
            header = json.loads(text)
            lessons.learner(header["tier"], header["link_group"]).restore(text)
        return lessons


class Learning:
    """All lessons, and how far the store was read.

    Args:
        store: effects are read from it, checkpoints written to it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._record_version = 0
        self._checkpointed_position = -1
        self._writing = asyncio.Lock()
        self.position = 0
        self.lessons: dict[Selector, Lessons] = {}
        self.refused: dict[str, int] = {}
        self._unwritten = False

    async def restore(self) -> None:
        """Take over the last checkpoint and replay what came after it.

        Raises:
            FieldError: the checkpoint is not one of ours.
            StoreError: it cannot be read.
        """
        record = await self._store.posteriors.get(_KEY)
        if record is not None:
            self._record_version = record.version
            self._take(record.document)
        await self.catch_up()

    def _take(self, text: str) -> None:
        try:
            document = json.loads(text)
            if document["format"] != _FORMAT:
                raise FieldError("planning.format", f"{document['format']} is not {_FORMAT}")
            lessons = {
                Selector(item["kind"], item["deployment"]): Lessons.from_document(item) for item in document["planes"]
            }
            self.lessons, self.position = lessons, int(document["position"])
        except (ValueError, KeyError, TypeError) as error:
            raise FieldError("planning", f"not a checkpoint: {error}", code="planning.malformed") from error
        self._checkpointed_position = self.position

    def for_selector(self, selector: Selector) -> Lessons:
        """The lessons of a selector; empty ones at first."""
        return self.lessons.setdefault(selector, Lessons())

    async def enroll(self, selector: Selector, agent_id: str) -> None:
        """Note whose effects these are, durably, before the first of them comes."""
        lessons = self.for_selector(selector)
        if agent_id not in lessons.agents:
            for other in self.lessons.values():
                other.agents.discard(agent_id)
            lessons.agents.add(agent_id)
            self._unwritten = True
        if self._unwritten:
            await self.checkpoint()

    async def catch_up(self) -> list[tuple[EffectRecord, Feedback | None]]:
        """Learn from all effects that became durable since; with what was made of each (None: nobody's agent)."""
        learned: list[tuple[EffectRecord, Feedback | None]] = []
        while batch := await self._store.effects.after(self.position, _BATCH):
            for position, record in batch:
                learned.append((record, self._observe(record)))
                self.position = position
        return learned

    def _observe(self, record: EffectRecord) -> Feedback | None:
        lessons = next((known for known in self.lessons.values() if record.agent_id in known.agents), None)
        if lessons is None:
            return None
        effect: Effect = record.effect
        # An agent's free text must not make learners without end.
        feedback = Feedback.ORPHAN
        if effect.tier in _TIERS:
            # By the time of arrival, which the store keeps, so that a replay sees the same ages.
            feedback = lessons.learner(effect.tier, LINK_GROUP).observe(effect, record.received_unix_s)
        if feedback is not Feedback.LEARNED:
            self.refused[feedback.value] = self.refused.get(feedback.value, 0) + 1
        return feedback

    def moved_log(self, selectors: Collection[Selector]) -> float:
        """How far what was learned since the last plans of these planes moved any of what they were made from."""
        known = (self.lessons[selector] for selector in selectors if selector in self.lessons)
        return max((each.moved_log for lessons in known for each in lessons.learners.values()), default=0.0)

    def probed_segments(self, selector: Selector, arm_id: str) -> int:
        """How many segments of an arm's probes count, whatever process asked for them."""
        lessons = self.lessons.get(selector)
        learners = lessons.learners.values() if lessons is not None else ()
        return max((each.quality.probed_segments(arm_id) for each in learners), default=0)

    async def checkpoint(self) -> None:
        """Write everything down.

        Raises:
            ConflictError: another daemon wrote in between.
            StoreError: it could not be written; the next one may.
        """
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        document: dict[str, Any] = {
            "format": _FORMAT,
            "position": self.position,
            "planes": [
                {"kind": selector.kind, "deployment": selector.deployment, **lessons.to_document()}
                for selector, lessons in sorted(
                    self.lessons.items(), key=lambda item: (item[0].kind, item[0].deployment)
                )
            ],
        }
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        await self._store.posteriors.put([PosteriorRecord(key=_KEY, version=self._record_version, document=text)])
        self._record_version += 1
        self._checkpointed_position = document["position"]
        self._unwritten = False

    @property
    def is_dirty(self) -> bool:
        """Whether anything was learned since the last checkpoint."""
        return self._unwritten or self.position != self._checkpointed_position

    async def take_probe(
        self,
        selector: Selector,
        profile: Profile,
        losses: Sequence[SegmentLoss],
        limits_nats: Mapping[str, float],
        now_unix_s: float,
    ) -> list[Look]:
        """Take what a probe measured of a profile's arm, durably; what was made of it, by class and table.

        Effects are read again after a crash; a probe is not, so it is written down at once.

        Args:
            limits_nats: by service class of the profile's workload: its quality limit.

        Raises:
            StoreError: it could not be written down; the next checkpoint does.
        """
        lessons = self.for_selector(selector)
        if lessons.place.model_fingerprint != profile.model_fingerprint:
            return []
        looks = [
            learner.quality.observe_probe(name, profile.arm_id, losses, limit, now_unix_s)
            for learner in lessons.learners.values()
            for name, limit in sorted(limits_nats.items())
        ]
        self._unwritten = True
        await self.checkpoint()
        return looks

    async def release(self, arm_id: str, selector: Selector, now_unix_s: float) -> list[Pin]:
        """Take an arm's pins off, durably; which there were.

        Raises:
            StoreError: it could not be written down; a restart before the next checkpoint would bring them back.
        """
        released: list[Pin] = []
        for learner in self.for_selector(selector).learners.values():
            pins = [pin for pin in learner.pins(now_unix_s).pins if pin.arm_id == arm_id]
            if pins and learner.unpin(arm_id):
                released += pins
        if released:
            await self.checkpoint()
        return released

    def to_document(self) -> list[dict[str, Any]]:
        """All posteriors, for people and for comparing two daemons."""
        return [
            {
                "kind": selector.kind,
                "deployment": selector.deployment,
                "tables": [json.loads(learner.to_json()) for _, learner in sorted(lessons.learners.items())],
            }
            for selector, lessons in sorted(self.lessons.items(), key=lambda item: (item[0].kind, item[0].deployment))
        ]
