"""A real pair with the plane in it: without a daemon, with one that forces arms, with damage, and told complete.

One pair plays one story, because starting it takes most of the time; each test looks at one part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as EffectPath
from dataplanes.sglang.launcher import Generation, PairSettings, ServerSettings, SglangClient, SglangPair

pytestmark = [pytest.mark.pair, pytest.mark.slow]

NEW_TOKENS = 8
LENGTHS = [1, 63, 64, 65, 100, 300, 600]
DAMAGED_FRAME = 3
ZEROS_FROM_FRAME = 62
TOKEN_BYTES = 2 * 30 * 3 * 64 * 2
PAGE_TOKENS = 64

LOSSY = Configuration(
    {
        "transform": "none",
        "quantise": "levels",
        "key_levels": 256,
        "key_axis": "token",
        "key_group": 64,
        "value_levels": 256,
        "value_axis": "token",
        "value_group": 64,
        "code": "entropy",
    }
)


LOSSLESS = Configuration({"transform": "none", "quantise": "none", "code": "zstd"})

# A near tie between two tokens may turn over; damaged KV turns over nearly everything.
RIGHT_SHARE = 0.8


@dataclass
class Story:
    """What happened, by part."""

    answers: dict[str, list[Generation]] = field(default_factory=dict)
    telemetry: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def tokens(self, part: str) -> list[tuple[int, ...]]:
        return [answer.token_ids for answer in self.answers[part]]

    def sent(self, part: str) -> list[Effect]:
        """The senders' effects of a part, in order."""
        ids = [answer.request_id for answer in self.answers[part]]
        found = {effect.transfer_id.partition("-")[0]: effect for effect in self.effects if effect.half is Half.SENDER}
        return [found[request_id] for request_id in ids]

    def received(self, part: str) -> list[Effect]:
        theirs = {effect.transfer_id: effect for effect in self.effects if effect.half is Half.RECEIVER}
        return [theirs[effect.transfer_id] for effect in self.sent(part) if effect.transfer_id in theirs]


@pytest.fixture(scope="module")
def story(
    model: Path, prompt: Callable[[int, int], list[int]], fixed_daemon: Any, tmp_path_factory: pytest.TempPathFactory
) -> Story:
    prompts = [prompt(number, length) for number, length in enumerate(LENGTHS)]
    told = Story()

    def play(client: SglangClient, part: str, extra_key: str, chosen: Sequence[list[int]]) -> None:
        told.answers[part] = [
            client.generate(
                token_ids,
                max_new_tokens=NEW_TOKENS,
                extra_key=extra_key,
                request_id=f"{part.replace(' ', '_')}.{index}",
            )
            for index, token_ids in enumerate(chosen)
        ]

    server = ServerSettings(
        model=model,
        radix_cache=False,
        environment={"CONTROLD_ADDRESS": fixed_daemon.address},
        chunked_prefill_tokens=256,
    )
    settings = PairSettings(
        server=server,
        log_dir=tmp_path_factory.mktemp("pair"),
        decode_environment={"CONTROLD_PD_FAULT": f"flip_byte:{DAMAGED_FRAME},zero_decode:{ZEROS_FROM_FRAME}"},
    )
    with SglangPair(settings) as pair:
        client = pair.client()
        play(client, "no daemon", "class=lossy", prompts)
        fixed_daemon.start()
        fixed_daemon.wait_until_in_force(fixed_daemon.publish({"lossy": LOSSY, "lossless": LOSSLESS, "default": None}))
        play(client, "damaged", "class=lossy", prompts[-1:])
        play(client, "lossy", "class=lossy", prompts)
        play(client, "lossless", "class=lossless", prompts)
        play(client, "raw", "class=other", prompts)
        # Some of the damaged transfer's frames were never written; a few too many fillers make up for them.
        frames = 10 + 2 * sum(-(-length // PAGE_TOKENS) for length in LENGTHS)
        play(client, "filler", "class=lossy", prompts[:1] * (ZEROS_FROM_FRAME - frames + 8))
        play(client, "zeros", "class=lossy", prompts[-2:])
        transfers = sum(len(answers) for part, answers in told.answers.items() if part not in ("no daemon", "filler"))
        fixed_daemon.wait_for_effects(transfers + 1)
        fixed_daemon.wait_for_effects(2 * len(LENGTHS) + 1, Half.RECEIVER)
        # The last report may have been sent before the last transfer left the queue.
        fixed_daemon.wait_for(
            lambda: (
                not any(link["backlog_bytes"] for seen in fixed_daemon.telemetry().values() for link in seen["links"])
            ),
            "the queue is empty",
        )
        told.telemetry = fixed_daemon.telemetry()
        told.effects = fixed_daemon.effects()
    return told


def assert_right(got: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> None:
    """The check that every lossy part uses."""
    pairs = [pair for ours, theirs in zip(got, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
    assert sum(ours == theirs for ours, theirs in pairs) >= RIGHT_SHARE * len(pairs)


def test_without_a_daemon_the_pair_serves_raw(story: Story) -> None:
    assert all(len(tokens) == NEW_TOKENS for tokens in story.tokens("no daemon"))
    # They were queued and told once the daemon came.
    for effect in story.sent("no daemon"):
        assert (effect.path, effect.arm_id, effect.table_version) == (EffectPath.RAW, "raw", 0)


def test_both_agents_say_from_inside_that_they_are_attached(story: Story) -> None:
    assert sorted(name.partition("-")[0] for name in story.telemetry) == ["decode", "prefill"]
    assert all(seen["attached"] for seen in story.telemetry.values())


def test_a_lossy_configuration_gives_the_right_text(story: Story) -> None:
    assert_right(story.tokens("lossy"), story.tokens("no daemon"))
    assert all(effect.path is EffectPath.CODED for effect in story.sent("lossy"))


def test_a_lossless_configuration_gives_the_same_tokens(story: Story) -> None:
    assert story.tokens("lossless") == story.tokens("no daemon")
    for effect in story.sent("lossless"):
        assert effect.path is EffectPath.CODED
        assert effect.wire_bytes < effect.raw_bytes


def test_the_raw_arm_gives_the_same_tokens(story: Story) -> None:
    assert story.tokens("raw") == story.tokens("no daemon")
    assert all(effect.path is EffectPath.RAW for effect in story.sent("raw"))


def test_a_flipped_byte_is_refused_resent_raw_and_the_text_is_right(story: Story) -> None:
    assert_right(story.tokens("damaged"), story.tokens("no daemon")[-1:])
    (effect,) = story.sent("damaged")
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.RAW_FALLBACK, Verdict.NACK, "nack:checksum")
    decode = next(seen for name, seen in story.telemetry.items() if name.startswith("decode"))
    assert decode["counters"]["pd.nack.checksum"] == 1


def test_a_decoder_that_returns_zeros_makes_the_same_check_fail(story: Story) -> None:
    with pytest.raises(AssertionError):
        assert_right(story.tokens("zeros"), story.tokens("no daemon")[-2:])


def test_effects_are_complete_on_both_sides(story: Story) -> None:
    for sent, length in zip(story.sent("lossy"), LENGTHS, strict=True):
        assert (sent.tokens, sent.service_class, sent.arm_id) == (length, "lossy", LOSSY.config_id)
        pages = -(-length // PAGE_TOKENS)
        assert sent.raw_bytes == sent.expected_bytes == pages * PAGE_TOKENS * TOKEN_BYTES
        assert sent.wire_bytes < 0.6 * length * TOKEN_BYTES + 20_000
        assert min(sent.encode_s, sent.wire_s, sent.decode_s, sent.total_s, sent.bandwidth_bytes_per_s) > 0
        assert sent.verdict is Verdict.VERIFIED
    assert len(story.received("lossy")) == len(LENGTHS)
    for sent, received in zip(story.sent("lossy"), story.received("lossy"), strict=True):
        assert (received.tokens, received.wire_bytes) == (sent.tokens, sent.wire_bytes)
        assert received.decode_s == pytest.approx(sent.decode_s)


def test_a_class_that_no_rule_knows_is_counted(story: Story) -> None:
    prefill = next(seen for name, seen in story.telemetry.items() if name.startswith("prefill"))
    assert prefill["counters"]["class_unmapped"] >= len(LENGTHS)
    assert all(effect.service_class == "default" for effect in story.sent("raw"))


def test_the_link_was_seen_by_the_sender_only(story: Story) -> None:
    for name, seen in story.telemetry.items():
        assert bool(seen["links"]) == name.startswith("prefill")
        for link in seen["links"]:
            assert link["bandwidth_bytes_per_s"] > 1e6
