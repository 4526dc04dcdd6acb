"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.core.status import EngineInfo
from headrace.engine.runner import DecoderLike
from headrace.engine.scheduler import SchedulerConfig
from headrace.ops.records import LayerCache
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineParts:
    """Put together by ``engine.loading``; tests put toys in."""

    decoder: DecoderLike
    kv: Sequence[LayerCache]  # one for each layer
    tokenizer: Tokenizer
    scheduler: SchedulerConfig
    info: EngineInfo
    device: torch.device
