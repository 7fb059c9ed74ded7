"""A real pair over a shaped link, with no control plane: it must answer as one unsplit server does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplanes.sglang.launcher import Generation, PairSettings, ServerSettings, SglangPair, UnsplitServer
from dataplanes.sglang.link import ShapedLink

pytestmark = [pytest.mark.pair, pytest.mark.root, pytest.mark.slow]

NEW_TOKENS = 12
# 20 prompts around the page size, within a page and across several.
LENGTHS = [1, 5, 40, 63, 64, 65, 100, 127, 128, 129, 150, 192, 200, 250, 256, 300, 350, 400, 513, 600]
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2


@dataclasses.dataclass(frozen=True, slots=True)
class LinkedPair:
    pair: SglangPair
    link: ShapedLink


@pytest.fixture(scope="module")
def settings(model: Path) -> ServerSettings:
    return ServerSettings(model=model, radix_cache=False)


@pytest.fixture(scope="module")
def prompts(prompt: Callable[[int, int], list[int]]) -> list[list[int]]:
    return [prompt(number, length) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(
    settings: ServerSettings, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, ...]]:
    """The unsplit server's answers; it is stopped before the pair starts."""
    with UnsplitServer(settings, log_dir=tmp_path_factory.mktemp("unsplit")) as unsplit:
        client = unsplit.client()
        return [client.generate(ids, max_new_tokens=NEW_TOKENS).token_ids for ids in prompts]


@pytest.fixture(scope="module")
def linked_pair(
    expected: list[tuple[int, ...]], settings: ServerSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LinkedPair]:
    with (
        ShapedLink(1_000_000_000) as link,
        SglangPair(PairSettings(server=settings, log_dir=tmp_path_factory.mktemp("pair")).over_link(link)) as pair,
    ):
        yield LinkedPair(pair, link)


def generate_all(pair: SglangPair, prompts: list[list[int]]) -> list[Generation]:
    client = pair.client()
    return [client.generate(ids, max_new_tokens=NEW_TOKENS, extra_key="class=test") for ids in prompts]


@pytest.mark.parametrize("rate_bits_per_s", [1_000_000_000, 20_000_000], ids=["1Gbit", "20Mbit"])
def test_greedy_tokens_equal_the_unsplit_server_s(
    linked_pair: LinkedPair,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    rate_bits_per_s: int,
) -> None:
    linked_pair.link.set_rate(rate_bits_per_s)
    before = linked_pair.link.sent_bytes()
    answers = generate_all(linked_pair.pair, prompts)
    crossed = linked_pair.link.sent_bytes() - before

    assert [answer.token_ids for answer in answers] == expected
    assert [answer.prompt_tokens for answer in answers] == LENGTHS
    # The comparison means something only if the KV really crossed the link, whole pages of it.
    assert crossed >= sum(LENGTHS) * KV_BYTES_PER_TOKEN


def test_a_slow_link_is_seen_in_the_time_to_the_first_token(linked_pair: LinkedPair, prompts: list[list[int]]) -> None:
    client = linked_pair.pair.client()
    linked_pair.link.set_rate(1_000_000_000)
    # More than once, for a busy machine may hold one up for as long as the slow link does.
    fast_ttft_s = min(client.generate(prompts[-1], max_new_tokens=2).ttft_s for _ in range(3))
    linked_pair.link.set_rate(20_000_000)
    slow = client.generate(prompts[-1], max_new_tokens=2)

    wire_s = len(prompts[-1]) * KV_BYTES_PER_TOKEN * 8 / 20e6
    assert slow.ttft_s > fast_ttft_s + 0.7 * wire_s
    assert slow.ttft_s <= slow.jct_s
