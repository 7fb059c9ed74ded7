"""KVServe's profile libraries (arXiv 2605.13734; JSON, one per model, data set and machine) as profiles of our space.

What carries over is the configuration and its ratio. Two things do not:

- Its accuracy is relative to an uncompressed run of a task and says nothing in nats. Such a profile has no loss samples
  and an infinite upper bound, so no quality limit lets it through; the accuracy stays readable in its provenance.
- Its speed S is of other hardware, so it is a prior. A component's S is the harmonic mean of encode and decode speed,
  and a pipeline's 1/S the sum over its components: encode and decode together take 2 V/S, which is given in equal parts
  to both. S counts 2^20 bytes as a megabyte. A coder's speed is per byte of its input, half of the raw bytes, yet
  enters S as if per raw byte; a library does not tell it apart, so its share of the time stays up to twice too long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controld.candidates.document import finite_number, printable_text, read_json_object, require_keys
from controld.candidates.exchange import IMPORTED, profile_identity
from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace

HARDWARE_PREFIX = "KVServe "
"""Before the machine's name: times of such hardware are nobody's measurements but priors."""

_BYTES_PER_MEGABYTE = 2**20
_REQUEST_TOKENS = 256
"""KVServe takes a channel's range over the whole request; the widest group of ours up to this stands for it."""
_LAYER_LOW_PERCENT = 33
_CODERS = {"ANS": "entropy"}
_QUANTISER_KEYS = (
    "hybrid_ratio", "high_key_max_value", "high_value_max_value", "low_key_max_value", "low_value_max_value",
    "axis_key", "axis_value", "split_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmapped:
    """A profile of the library that has no counterpart here."""

    profile_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedLibrary:
    """What a library is here."""

    profiles: tuple[Profile, ...]
    unmapped: tuple[Unmapped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTarget:
    """The model that a library is read for.

    Args:
        space: what a plane of this model advertises; only its points are taken.
        workload: whose profiles they become; None takes the library's data set.
        kv_bytes_per_token: raw bytes, for the transfer at the library's input length.
    """

    model_fingerprint: str
    space: StrategySpace
    kv_bytes_per_token: int
    workload: str | None = None


class _UnmappedError(Exception):
    """Carries why one profile has no counterpart."""


def library_model(text: str) -> str:
    """The name of the model that a library is for. Raises: FieldError: not a library."""
    return printable_text(_metadata(read_json_object(text))["model_name"], "library_metadata.model_name")


def map_library(text: str, target: LibraryTarget) -> MappedLibrary:
    """Read a library.

    Raises:
        FieldError: not a library of this shape, or a number that is impossible; the field is named by its path.
            Keys beside those that are read pass, except within what decides the configuration.
    """
    document = read_json_object(text)
    metadata = _metadata(document)
    buckets = _list(document.get("accuracy_buckets"), "accuracy_buckets")
    mapped: dict[tuple[str, ...], tuple[str, Profile]] = {}
    unmapped: list[Unmapped] = []
    for bucket_index, bucket in enumerate(buckets):
        at = f"accuracy_buckets[{bucket_index}]"
        entries = _list(_table(bucket, at).get("pareto_profiles"), f"{at}.pareto_profiles")
        for index, entry in enumerate(entries):
            path = f"{at}.pareto_profiles[{index}]"
            profile_id = printable_text(_member(_table(entry, path), "profile_id", path), f"{path}.profile_id")
            try:
                profile = _profile(entry, path, profile_id, metadata, target)
            except _UnmappedError as error:
                unmapped.append(Unmapped(profile_id=profile_id, reason=str(error)))
                continue
            first_id, _ = mapped.setdefault(profile_identity(profile), (profile_id, profile))
            if first_id != profile_id:
                unmapped.append(Unmapped(profile_id=profile_id, reason=f"the same configuration as {first_id}"))
    return MappedLibrary(profiles=tuple(profile for _, profile in mapped.values()), unmapped=tuple(unmapped))


def _metadata(document: Mapping[str, Any]) -> dict[str, Any]:
    metadata = _table(document.get("library_metadata"), "library_metadata")
    for name in ("model_name", "dataset", "machine"):
        printable_text(metadata.get(name), f"library_metadata.{name}")
    if _positive(metadata.get("input_length"), "library_metadata.input_length") % 1:
        raise FieldError("library_metadata.input_length", "is not a whole number of tokens")
    return metadata


def _profile(
    entry: Mapping[str, Any], path: str, profile_id: str, metadata: Mapping[str, Any], target: LibraryTarget
) -> Profile:
    performance = _table(entry.get("performance_metrics"), f"{path}.performance_metrics")
    quality = _table(entry.get("quality_metrics"), f"{path}.quality_metrics")
    ratio = _positive(performance.get("compression_ratio"), f"{path}.performance_metrics.compression_ratio")
    speed = _positive(performance.get("harmonic_speed_mbps"), f"{path}.performance_metrics.harmonic_speed_mbps")
    accuracy = finite_number(quality.get("accuracy"), f"{path}.quality_metrics.accuracy")
    metric = printable_text(quality.get("metric_name", "accuracy"), f"{path}.quality_metrics.metric_name")
    configuration = _configuration(
        _table(entry.get("compression_config"), f"{path}.compression_config"),
        f"{path}.compression_config",
        target.space,
    )
    if speed * _BYTES_PER_MEGABYTE < 1:
        raise FieldError(f"{path}.performance_metrics.harmonic_speed_mbps", f"{speed:g} is under one byte per second")
    half = StageTime(0.0, 1.0 / (speed * _BYTES_PER_MEGABYTE))
    hardware = f"{HARDWARE_PREFIX}{metadata['machine']}"
    try:
        return Profile(
            configuration=configuration,
            workload=target.workload or str(metadata["dataset"]),
            model_fingerprint=target.model_fingerprint,
            loss_mean_nats=0.0,
            loss_se_nats=0.0,
            loss_samples=0,
            loss_upper_nats=math.inf,
            worst_prompt_tokens=0,
            ratio=ratio,
            encode=half,
            decode=half,
            median_transfer_bytes=float(metadata["input_length"]) * target.kv_bytes_per_token,
            sender_hardware=hardware,
            receiver_hardware=hardware,
            corpus=str(metadata["dataset"]),
            provenance=f"{IMPORTED}KVServe {profile_id}, {metric} {accuracy:.6g}, no loss measured, times are a prior",
        )
    except FieldError as error:
        raise FieldError(path, f"makes an impossible profile: {error.message}", hint=error.hint) from error


def _configuration(config: Mapping[str, Any], path: str, space: StrategySpace) -> Configuration:
    if config.get("enabled") is not True:
        raise _UnmappedError("compression is not enabled")
    pipeline = _list(config.get("pipeline"), f"{path}.pipeline")
    stages = ("transformer", "quantizer", "codec")
    if any(stage not in stages for stage in pipeline) or pipeline != [stage for stage in stages if stage in pipeline]:
        raise _UnmappedError(f"the pipeline {pipeline} is no sequence of {', '.join(stages)}")
    transform = _transform(_table(config.get("transformer_config", {}), f"{path}.transformer_config"), pipeline)
    values: dict[str, Value] = {"transform": transform, "quantise": "none"}
    if "quantizer" in pipeline:
        quantiser = _table(config.get("quantizer_config"), f"{path}.quantizer_config")
        values |= _quantiser(quantiser, f"{path}.quantizer_config", space)
        # It keeps no first tokens apart; where ours are a knob that is always written, it stands at none.
        values |= {p.name: 0 for p in space.parameters if p.name == "sink_tokens" and p.default is None}
    values["code"] = "none"
    if "codec" in pipeline:
        values["code"] = _coder(_table(config.get("codec_config"), f"{path}.codec_config"))
    configuration = Configuration(values)
    try:
        space.validate(configuration)
    except FieldError as error:
        raise _UnmappedError(f"outside the advertised space: {error}") from error
    return configuration


def _transform(config: Mapping[str, Any], pipeline: list[Any]) -> str:
    if "transformer" not in pipeline:
        return "none"
    kind = config.get("transform_type")
    if kind not in ("none", "hadamard"):
        raise _UnmappedError(f"the transform {kind!r} is unknown here")
    # Its seed picks other random signs, which are as good as ours.
    return str(kind)


def _coder(config: Mapping[str, Any]) -> str:
    name = config.get("nvcomp_algorithm") if config.get("codec_type") == "nvcomp" else config.get("codec_type")
    coder = _CODERS.get(name) if isinstance(name, str) else None
    if coder is None:
        raise _UnmappedError(f"the coder {name!r} has no counterpart, and its bytes say nothing of another coder's")
    return coder


def _quantiser(config: Mapping[str, Any], path: str, space: StrategySpace) -> dict[str, Value]:
    require_keys(config, path, _QUANTISER_KEYS, ("model_name", "impl"))
    split = config["split_type"]
    if split not in ("head", "layer"):
        raise _UnmappedError(f"the split {split!r} is unknown here")
    if (config["axis_key"], config["axis_value"]) != ("channel", "token"):
        raise _UnmappedError(f"axes {config['axis_key']!r} and {config['axis_value']!r}: only channel and token map")
    share = finite_number(config["hybrid_ratio"], f"{path}.hybrid_ratio")
    if not 0 <= share <= 1:
        raise FieldError(f"{path}.hybrid_ratio", f"{share:g} is not in 0..1")
    values: dict[str, Value] = {"quantise": f"{split}_levels"}
    for part in ("key", "value"):
        for level, ours in (("high", "levels"), ("low", "low_levels")):
            name = f"{level}_{part}_max_value"
            if type(config[name]) is not int:
                raise FieldError(f"{path}.{name}", f"{config[name]!r} is not a whole number")
            values[f"{part}_{ours}"] = config[name]
        # A split by layers is of the last third, whatever the ratio says.
        values[f"{part}_low_percent"] = round(100 * share) if split == "head" else _LAYER_LOW_PERCENT
    values |= {"key_axis": "channel", "key_group": _widest_group(space), "value_axis": "all_heads"}
    if split == "head":
        profiles = _offered(space, "head_profile")
        if not profiles:
            raise _UnmappedError("it splits by heads, and no plane of this model holds a head profile")
        if len(profiles) > 1:
            raise _UnmappedError(f"it splits by heads, and there are {len(profiles)} head profiles")
        values["head_profile"] = profiles[0]
    return values


def _widest_group(space: StrategySpace) -> int:
    """Tokens in the widest group of keys along a channel that the space has."""
    misfits = {
        group
        for rule in space.forbidden
        if set(rule.values) == {"key_axis", "key_group"} and "channel" in rule.values["key_axis"]
        for group in rule.values["key_group"]
    }
    fitting = [
        group
        for group in _offered(space, "key_group")
        if isinstance(group, int) and group <= _REQUEST_TOKENS and group not in misfits
    ]
    if not fitting:
        raise _UnmappedError("the space has no groups of tokens along a channel")
    return max(fitting)


def _offered(space: StrategySpace, name: str) -> tuple[Value, ...]:
    return next((parameter.values for parameter in space.parameters if parameter.name == name), ())


def _table(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(path, "is missing or not an object")
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(path, "is missing or not a list")
    return value


def _member(table: Mapping[str, Any], name: str, path: str) -> Any:
    if name not in table:
        raise FieldError(f"{path}.{name}", "is missing")
    return table[name]


def _positive(value: object, path: str) -> float:
    number = finite_number(value, path)
    if number <= 0:
        raise FieldError(path, f"{number:g} is not above zero")
    return number
