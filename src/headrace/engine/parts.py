"""What an engine is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.core.status import EngineInfo
from headrace.engine.runner import DecoderLike
from headrace.engine.scheduler import SchedulerConfig
from headrace.ops.records import LayerKV
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineParts:
    """Put together by ``engine.loading``; tests put toys in."""

    decoder: DecoderLike
    kv: list[LayerKV]  # one for each layer
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    info: EngineInfo
    device: torch.device
