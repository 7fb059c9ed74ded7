"""Published KV codecs as named configurations, so that whatever is chosen can be judged against them.

Each function is one published method: its docstring names the source, the definition and where this form of it differs.
Common to all: the entropy coder stands in for a method's own arithmetic coder or GPU coder, which sees the same
symbols; integer levels decode to the middle of equal cells, where most papers decode to the ends of one cell fewer,
which makes the largest error smaller for up to a hundred levels; scales are bfloat16.

A method's tunings are for benchmarks: a baseline gets its best point, not its default. They reach beyond the paper
where that helps it (an entropy coder, a rotation, a few first tokens kept).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.layout import KVLayout, PlaneRole
from dataplanes.kvcodec.space import BIT_DECAY, lmcache_low_percent
from dataplanes.numerics.nvfp4 import BlockRule

Values = dict[str, Value]


def kivi(layout: KVLayout, *, levels: int = 4, group: int = 32, window: int = 128, code: str = "bitpack") -> Values:
    """KIVI (Liu et al., ICML 2024, arXiv 2402.02750): 2 bits, groups of 32, the last 128 tokens in full precision.

    Keys per channel over groups of tokens, values per token over groups of channels, minimum and step per group. KIVI
    leaves keys unquantised until a group of the window's size is full; here the window is the last tokens exactly.
    """
    return {
        "transform": "none",
        "quantise": "levels",
        **_window(window),
        **_per_part(layout, levels=(levels, levels)),
        **_kivi_groups(layout, group),
        "code": code,
    }


def kivi_tunings(layout: KVLayout) -> list[Values]:
    """More levels, wider groups, no window and an entropy coder: what KIVI gains from most on a wire."""
    wide = [kivi(layout, levels=count, group=64, window=0, code="entropy") for count in (4, 5, 6, 8, 12, 16)]
    return [
        kivi(layout, levels=16),
        kivi(layout, levels=4, window=32, code="entropy"),
        kivi(layout, levels=8, window=32, code="entropy"),
        *wide,
        *({**values, "sink_tokens": 1} for values in wide),
    ]


def cachegen(layout: KVLayout, *, bins: tuple[int, int] = (32, 16), sink_tokens: int = 0) -> Values:
    """CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240) in the form that LMCache runs.

    One step per token and layer from the largest magnitude over all heads; 32 bins in the first ten layers of keys and
    the first two of values, 16 in the others; an arithmetic coder with a table per channel, for which the
    entropy coder has one per 128 KiB. Like LMCache, and unlike the paper, this codes no differences between tokens.
    """
    part = {"key": lmcache_low_percent(layout, "key"), "value": lmcache_low_percent(layout, "value")}
    return {
        "transform": "none",
        "quantise": "absmax_levels",
        **_sinks(sink_tokens),
        **_per_part(layout, levels=(bins[0], bins[0]), low_levels=(bins[1], bins[1])),
        **{f"{name}_low_percent": percent for name, percent in part.items() if name in _part_names(layout)},
        "code": "entropy",
    }


def cachegen_tunings(layout: KVLayout) -> list[Values]:
    """Bins scaled together, as CacheGen's own levels of quality are, with and without the first four tokens kept."""
    scaled = ((64, 32), (48, 24), (40, 20), (32, 16), (24, 12), (20, 10), (16, 8))
    return [cachegen(layout, bins=bins, sink_tokens=sinks) for sinks in (0, 4) for bins in scaled]


def kvserve(
    layout: KVLayout,
    head_profile: str,
    *,
    levels: tuple[int, int, int, int] = (12, 6, 8, 4),
    low_percent: int = 80,
    transform: str = "none",
    sink_tokens: int = 0,
) -> Values:
    """KVServe (SIGCOMM 2026, arXiv 2605.13734), its default profile.

    The 80 % of all heads of all layers that score lowest get 6 levels for keys and 4 for values, the others 12 and 8.
    Keys have a range per channel, values one per token over the heads; nvCOMP's ANS coder. KVServe takes a channel's
    range over a whole request, which would tie every token to every other: here over 256. A token's range spans the
    layer's heads of as many levels.
    """
    high_key, low_key, high_value, low_value = levels
    return {
        "transform": transform,
        "quantise": "head_levels",
        **_sinks(sink_tokens),
        **_per_part(
            layout,
            levels=(high_key, high_value),
            low_levels=(low_key, low_value),
            low_percent=(low_percent, low_percent),
            axis=("channel", "all_heads"),
        ),
        "key_group": _token_group(layout, 256),
        "head_profile": head_profile,
        "code": "entropy",
    }


def kvserve_tunings(layout: KVLayout, head_profile: str) -> list[Values]:
    """Levels scaled together, with and without the Hadamard transform, a share of 90 %, and the first tokens kept."""
    scaled = ((8, 4, 6, 3), (12, 6, 8, 4), (16, 8, 10, 5), (20, 10, 14, 7), (24, 12, 16, 8))
    plain = [kvserve(layout, head_profile, levels=levels) for levels in scaled]
    rotated = [
        kvserve(layout, head_profile, levels=levels, low_percent=90, transform="hadamard", sink_tokens=sinks)
        for sinks in (0, 4)
        for levels in scaled
    ]
    return [*plain, *rotated]


def kvserve_top(layout: KVLayout, head_profile: str) -> Values:
    """KVServe's most aggressive shipped profile: rotated, 90 % low, 6 levels for keys, 6 and 4 for values."""
    return kvserve(layout, head_profile, levels=(6, 6, 6, 4), low_percent=90, transform="hadamard")


def kvserve_top_tunings(layout: KVLayout, head_profile: str) -> list[Values]:
    """The same with more levels for all, and the first tokens kept."""
    return [
        kvserve(layout, head_profile, levels=levels, low_percent=90, transform="hadamard", sink_tokens=sinks)
        for sinks in (0, 4)
        for levels in ((6, 6, 6, 4), (8, 8, 8, 5), (10, 10, 10, 6), (12, 12, 12, 8))
    ]


def splitzip(layout: KVLayout) -> Values:
    """SplitZip (arXiv 2605.01708): lossless, 4-bit codes for the sixteen commonest exponents, escapes for others."""
    return {"transform": "none", "quantise": "none", "code": "splitzip"}


def splitzip_tunings(layout: KVLayout) -> list[Values]:
    """The other lossless coders, and SplitZip after FP8, as the paper combines them."""
    lossless: Values = {"transform": "none", "quantise": "none"}
    return [{**lossless, "code": code} for code in ("entropy", "zstd")] + [fp8(layout, code="splitzip")]


def ratequant(
    layout: KVLayout, head_profile: str, *, bits: float = 2.5, group: int = 32, window: int = 128, code: str = "bitpack"
) -> Values:
    """RateQuant (arXiv 2605.06675) on KIVI: 2.5 bits on average, whole bits for each head, keys and values apart.

    `bit_allocation` states the closed form. A bit divides KIVI's error by about 5. Heads get 2 to 8 bits.
    """
    return {
        "transform": "none",
        "quantise": "allocated_levels",
        **_window(window),
        **_per_part(layout, bits=(_number(bits), _number(bits))),
        **_kivi_groups(layout, group),
        "head_profile": head_profile,
        "bit_decay": BIT_DECAY,
        "code": code,
    }


def ratequant_tunings(layout: KVLayout, head_profile: str) -> list[Values]:
    """More bits, wider groups, no window and an entropy coder."""
    wide = [
        ratequant(layout, head_profile, bits=bits, group=64, window=0, code="entropy")
        for bits in (2.25, 2.5, 3.0, 3.5, 4.0)
    ]
    return [
        *(ratequant(layout, head_profile, bits=bits) for bits in (3.0, 4.0)),
        *wide,
        *({**values, "sink_tokens": 1} for values in wide),
    ]


def turboquant(layout: KVLayout, *, levels: int = 16, sink_tokens: int = 0, code: str = "bitpack") -> Values:
    """TurboQuant (Zandieh et al. 2025, arXiv 2504.19874), its form for the least squared error, at 4 bits.

    A random rotation, here the Hadamard transform with random signs; a Lloyd-Max codebook for Gaussian coordinates; a
    norm per head vector. The paper's fractional bits (2.5, 3.5) mix two codebooks by channel; here any number of levels
    is one codebook.
    """
    return {
        "transform": "hadamard",
        "quantise": "lloyd_max",
        **_sinks(sink_tokens),
        **_per_part(layout, levels=(levels, levels)),
        "code": code,
    }


def turboquant_tunings(layout: KVLayout) -> list[Values]:
    """Other sizes of codebook, an entropy coder, more levels for keys, and the first tokens kept."""
    sizes = (5, 6, 8, 11, 16, 24)
    coded = [turboquant(layout, levels=count, sink_tokens=sinks, code="entropy") for sinks in (0, 4) for count in sizes]
    split = [{**turboquant(layout, levels=2 * count, sink_tokens=4, code="entropy")} for count in (6, 8)]
    for values, count in zip(split, (6, 8), strict=True):
        if "value" in _part_names(layout):
            values["value_levels"] = count
    return [turboquant(layout, levels=8), *coded, *split]


def fp8(layout: KVLayout, *, transform: str = "none", sink_tokens: int = 0, code: str = "none") -> Values:
    """FP8 e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), with a scale per head vector.

    Serving engines take one scale per layer, or none; a scale per vector costs 2 bytes in 64 and never saturates.
    """
    return {"transform": transform, "quantise": "fp8_e4m3", **_sinks(sink_tokens), "code": code}


def fp8_tunings(layout: KVLayout) -> list[Values]:
    """Coders, the rotation, and the first tokens kept."""
    return [
        fp8(layout, code="entropy"),
        fp8(layout, code="splitzip"),
        fp8(layout, transform="hadamard", code="entropy"),
        fp8(layout, sink_tokens=1, code="entropy"),
    ]


def nvfp4_preset(
    layout: KVLayout,
    *,
    block_rule: BlockRule = BlockRule.PLAIN,
    transform: str = "none",
    sink_tokens: int = 0,
    code: str = "bitpack",
) -> Values:
    """NVFP4 (NVIDIA 2025): e2m1 in blocks of 16 with e4m3 scales; the outer scale per token instead of per tensor.

    With the block rule of 4over6 (Cook et al. 2025, arXiv 2512.02010) a block's peak is at 6 or at 4 by squared error.
    """
    rule: Values = {} if block_rule is BlockRule.PLAIN else {"block_rule": block_rule.value}
    return {"transform": transform, "quantise": "nvfp4", **rule, **_sinks(sink_tokens), "code": code}


def nvfp4_tunings(layout: KVLayout) -> list[Values]:
    """An entropy coder, the rotation, the first tokens kept, and 4over6."""
    return [
        nvfp4_preset(layout, block_rule=rule, transform=transform, sink_tokens=sinks, code="entropy")
        for rule in BlockRule
        for sinks in (0, 4)
        for transform in ("none", "hadamard")
    ]


@dataclass(frozen=True, slots=True)
class Preset:
    """One published method.

    Args:
        define: its configuration as published.
        tune: what else a benchmark should try for it.
        needs_head_profile: whether both take a profile's id.
    """

    define: Callable[..., Values]
    tune: Callable[..., list[Values]]
    needs_head_profile: bool = False

    def configuration(self, layout: KVLayout, head_profile: str | None = None) -> Configuration:
        """The method as published, for a layout.

        Args:
            layout: decides which groups fit and how many layers are low.
            head_profile: id of the profile that sender and receiver hold; see `needs_head_profile`.

        Raises:
            CodecError: a profile is needed and none is named.
        """
        return Configuration(self.define(layout, *self._profile(head_profile)))

    def tunings(self, layout: KVLayout, head_profile: str | None = None) -> tuple[Configuration, ...]:
        """The method as published and all its tunings, each once; arguments as for `configuration`."""
        tuned = (Configuration(values) for values in self.tune(layout, *self._profile(head_profile)))
        return tuple(dict.fromkeys([self.configuration(layout, head_profile), *tuned]))

    def _profile(self, head_profile: str | None) -> tuple[str, ...]:
        if not self.needs_head_profile:
            return ()
        if head_profile is None:
            raise CodecError("this preset needs a head profile", code="codec.artefact")
        return (head_profile,)


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "kivi": Preset(kivi, kivi_tunings),
        "cachegen": Preset(cachegen, cachegen_tunings),
        "kvserve": Preset(kvserve, kvserve_tunings, needs_head_profile=True),
        "kvserve_top": Preset(kvserve_top, kvserve_top_tunings, needs_head_profile=True),
        "splitzip": Preset(splitzip, splitzip_tunings),
        "ratequant": Preset(ratequant, ratequant_tunings, needs_head_profile=True),
        "turboquant": Preset(turboquant, turboquant_tunings),
        "fp8": Preset(fp8, fp8_tunings),
        "nvfp4": Preset(nvfp4_preset, nvfp4_tunings),
    }
)
"""Every published method by name."""


def _part_names(layout: KVLayout) -> tuple[str, ...]:
    """Which of keys (or latents) and values the layout has."""
    has_keys = bool(layout.roles & {PlaneRole.KEY, PlaneRole.LATENT})
    return ("key",) * has_keys + ("value",) * (PlaneRole.VALUE in layout.roles)


def _per_part(layout: KVLayout, **settings: tuple[Value, Value]) -> Values:
    """Settings of keys and of values, for those that the layout has."""
    both = {"key": 0, "value": 1}
    return {f"{part}_{name}": pair[both[part]] for part in _part_names(layout) for name, pair in settings.items()}


def _kivi_groups(layout: KVLayout, group: int) -> Values:
    """Keys per channel over tokens, values per token over channels."""
    return _per_part(
        layout,
        axis=("channel", "token"),
        group=(_token_group(layout, group), _channel_group(layout, group)),
    )


def _token_group(layout: KVLayout, wanted: int) -> int:
    """Tokens per group: as wanted where that fits the pages, else the most whole pages within it, or one."""
    page = layout.page_tokens
    return wanted if wanted % page == 0 or page % wanted == 0 else max(wanted // page, 1) * page


def _channel_group(layout: KVLayout, wanted: int) -> int:
    """Channels per group: the most up to `wanted` that divide every head of values."""
    sizes = {plane.head_dim for plane in layout.planes if plane.role is PlaneRole.VALUE}
    return next(size for size in range(wanted, 0, -1) if all(dim % min(size, dim) == 0 for dim in sizes))


def _sinks(tokens: int) -> Values:
    return {"sink_tokens": tokens} if tokens else {}


def _window(tokens: int) -> Values:
    return {"window_tokens": tokens} if tokens else {}


def _number(value: float) -> Value:
    """Configurations write whole numbers as integers."""
    return int(value) if value.is_integer() else value
