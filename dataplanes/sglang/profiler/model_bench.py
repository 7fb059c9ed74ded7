"""A model folder on the bench: loaded when first needed, its prompts and codecs kept between trials."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from dataplanes.kvcodec import NO_ARTEFACTS, ArtefactShelf
from dataplanes.kvcodec.space import kv_strategy_space
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.coder_cost import WireCodec
from dataplanes.sglang.profiler.corpus import corpus_for
from dataplanes.sglang.profiler.quality import PromptBank, QualityMeter, bank_for, load_model
from dataplanes.sglang.profiler.wire_codec import FRAME_BYTES, FrameCodec, layout_of


class ModelBench:
    """What trials on one model need.

    Args:
        model_dir: a Hugging Face model folder.
        texts_dir: texts by workload; see `corpus_for`.
        page_tokens: page size of the pools that the measured frames are for.
        frame_bytes: raw bytes of a frame, about; see `FrameCodec`.
        artefacts_dir: folder of calibrated artefacts; those of this model are used.
        space_file: the part of the space that may be measured, as JSON; None for all of it.

    Raises:
        ModelFolderError: `model_dir` holds no model.
        FieldError: `space_file` cannot be read, or holds no part of this model's space.
    """

    def __init__(
        self,
        model_dir: Path,
        texts_dir: Path | None = None,
        *,
        page_tokens: int = 64,
        frame_bytes: int = FRAME_BYTES,
        artefacts_dir: Path | None = None,
        space_file: Path | None = None,
    ) -> None:
        self.identity = identify_model(model_dir)
        self.layout = layout_of(self.identity, page_tokens=page_tokens)
        self._artefacts: Mapping[str, object] = NO_ARTEFACTS
        if artefacts_dir is not None:
            self._artefacts = ArtefactShelf.of_folder(artefacts_dir, self.identity.fingerprint)
        whole = kv_strategy_space(self.layout, self._artefacts)
        self.space = whole if space_file is None else _part_of(whole, space_file)
        self._frame_bytes = frame_bytes
        self._model_dir = model_dir
        self._texts_dir = texts_dir
        self._meter: QualityMeter | None = None
        self._banks: dict[tuple[str, int], PromptBank] = {}

    def bank_for(self, workload: str, continuation_tokens: int) -> PromptBank:
        """The prompts of a workload.

        Raises:
            CorpusError: the workload has no texts.
        """
        key = (workload, continuation_tokens)
        if key not in self._banks:
            corpus = corpus_for(workload, self._texts_dir)
            if self._meter is None:
                kv_dtype = getattr(torch, self.identity.kv_dtype)
                self._meter = QualityMeter(load_model(self._model_dir), kv_dtype=kv_dtype)
            self._banks[key] = bank_for(self._meter, self._model_dir, corpus, continuation_tokens=continuation_tokens)
        return self._banks[key]

    def codec_for(self, configuration: Configuration) -> WireCodec:
        """A codec with its own buffers.

        Raises:
            CodecError: the model's KV cannot be coded that way.
        """
        return FrameCodec(configuration, self.layout, frame_bytes=self._frame_bytes, artefacts=self._artefacts)


def _part_of(whole: StrategySpace, file: Path) -> StrategySpace:
    try:
        part = StrategySpace.from_json(file.read_text())
        part.require_part_of(whole)
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("space", f"{file} cannot be read: {error}") from error
    except FieldError as error:
        hint = error.hint or "what `controld space --json | jq '.[0].space'` prints, with fewer values or more rules"
        raise FieldError(f"{file}: {error.field}", error.problem, hint=hint) from error
    if part.count(lossy_only=True) == 0:
        raise FieldError(f"{file}: space", "leaves nothing to measure")
    return part
