import threading

import pytest
import torch
from torch import Tensor

from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.reference.checkpoint import build_vae
from dataplanes.longlive.reference.decoder import SessionDecoder, VaeMode
from dataplanes.longlive.reference.vae import FeatureCache, Vae

CHUNKS = [torch.randn(3, 8, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def _frames(decoder: SessionDecoder, chunks: list[Tensor]) -> Tensor:
    found = []
    for chunk in chunks:
        decoder.submit(chunk)
        found += decoder.take()
    found += decoder.close()
    return torch.cat([one.frames for one in found])


def test_frames_are_the_same_whenever_they_are_decoded() -> None:
    vae = build_vae("untrained")
    batch, stream, later = (_frames(SessionDecoder(vae, mode), CHUNKS) for mode in VaeMode)
    assert batch.shape == (9 + 3 * 12, 32, 32, 3)
    assert torch.equal(batch, stream) and torch.equal(batch, later)


def test_the_mode_may_change_between_chunks() -> None:
    vae = build_vae("untrained")
    decoder = SessionDecoder(vae, VaeMode.BATCH)
    found = []
    for mode, chunk in zip([VaeMode.BATCH, VaeMode.ASYNC, VaeMode.STREAM, VaeMode.ASYNC], CHUNKS, strict=True):
        decoder.switch(mode)
        decoder.submit(chunk)
        found += decoder.take()
    found += decoder.close()
    expected = _frames(SessionDecoder(vae, VaeMode.STREAM), CHUNKS)
    assert torch.equal(torch.cat([one.frames for one in found]), expected)


class _HeldVae(Vae):
    """Decodes no chunk before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Semaphore(0)

    def stream(self, latents: Tensor, cache: FeatureCache) -> Tensor:
        self.may_go_on.acquire()
        return super().stream(latents, cache)


def test_a_slow_decoder_holds_the_session_back() -> None:
    vae = _HeldVae()
    decoder = SessionDecoder(vae, VaeMode.ASYNC)
    decoder.submit(CHUNKS[0])
    while decoder._thread is not None and not decoder._thread._work.empty():
        threading.Event().wait(0.001)
    decoder.submit(CHUNKS[1])
    third = threading.Thread(target=decoder.submit, args=(CHUNKS[2],))
    third.start()
    third.join(0.05)
    assert third.is_alive(), "one is decoded, one waits: the third must wait outside"
    vae.may_go_on.release(3)
    third.join(60)
    assert not third.is_alive()
    assert [len(one.frames) for one in decoder.close()] == [9, 12, 12]


class _BrokenVae(Vae):
    def stream(self, latents: Tensor, cache: FeatureCache) -> Tensor:
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize("mode", list(VaeMode))
def test_a_failure_shows_at_the_next_call_and_never_hangs(mode: VaeMode) -> None:
    decoder = SessionDecoder(_BrokenVae(), mode)
    with pytest.raises(EngineError, match="no such kernel") as caught:
        for _ in range(10):
            decoder.submit(CHUNKS[0])
        decoder.close()
    assert caught.value.code == "engine.decoder_failed"
    decoder.abandon()
