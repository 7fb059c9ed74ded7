import pytest
import torch

from dataplanes.longlive.reference.checkpoint import build_vae
from dataplanes.longlive.reference.vae import FeatureCache, Vae


@pytest.fixture
def vae() -> Vae:
    return build_vae("untrained")


def _latents(count: int) -> torch.Tensor:
    return torch.randn(count, 8, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("pieces", [[9], [3, 3, 3], [1, 2, 4, 2]])
def test_chunked_decoding_gives_the_bits_of_the_whole(vae: Vae, pieces: list[int]) -> None:
    latents = _latents(9)
    whole = torch.cat([vae.stream(one[None], cache) for cache in [FeatureCache()] for one in latents])
    cache: FeatureCache = {}
    with torch.no_grad():
        parts = [vae.stream(piece, cache) for piece in latents.split(pieces)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole) == 1 + 4 * 8


def test_streaming_is_the_causal_convolution_over_the_whole_clip(vae: Vae) -> None:
    vae = vae.double()
    latents = _latents(7).double()
    with torch.no_grad():
        at_once = vae.decoder(latents[None])[0, 3:].clamp(0, 1)
        streamed = vae.decoder.stream(latents, {})
    assert float((at_once - streamed).abs().max()) < 1e-12


def test_nothing_looks_ahead(vae: Vae) -> None:
    latents = _latents(6)
    later = latents.clone()
    later[4:] += 1
    with torch.no_grad():
        assert torch.equal(vae.stream(latents, {})[:13], vae.stream(later, {})[:13])
        frames = torch.rand(1, 17, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        changed = frames.clone()
        changed[:, 9:] = 0
        assert torch.allclose(vae.encode(frames)[:, :3], vae.encode(changed)[:, :3], atol=1e-6)
        assert not torch.allclose(vae.encode(frames)[:, 3], vae.encode(changed)[:, 3], atol=1e-3)
