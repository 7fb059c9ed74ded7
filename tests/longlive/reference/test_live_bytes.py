import torch

from dataplanes.longlive.reference.live_bytes import LiveBytes


def test_the_peak_is_what_was_alive_at_once() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second * 2
        del second
        view = third.view(10, 100)[2:]
        assert live.now_bytes == 4000
        del third
        assert live.now_bytes == 4000, "the view keeps the storage"
        del view
    assert live.now_bytes == 0
    assert live.peak_bytes == 8000


def test_what_was_there_before_does_not_count() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        before.view(-1)
        before.add_(1)
    assert live.peak_bytes == 0
