"""llama.cpp beside us, through the prebuilt wheel ``xllamacpp`` (pip install xllamacpp).

Only benchmarks import this; nothing under src/ knows it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from gguf.quants import dequantize

GGML_TYPE_F32 = 0


@dataclass(frozen=True)
class Completion:
    """One greedy completion: generated ids and llama.cpp's own timings, tokens per second."""

    token_ids: list[int]
    prefill_tok_s: float
    decode_tok_s: float


class LlamaCpp:
    """One loaded model; ``slots`` sequences can run at once."""

    name = f"llama.cpp (xllamacpp {version('xllamacpp')})"

    def __init__(
        self, path: Path, *, threads: int, context: int, slots: int = 1, kv_f32: bool = False
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context * slots
        params.n_parallel = slots
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.verbosity = 0
        if kv_f32:
            params.cache_type_k = xllamacpp.ggml_type(GGML_TYPE_F32)
            params.cache_type_v = xllamacpp.ggml_type(GGML_TYPE_F32)
        self._server = xllamacpp.Server(params)

    def complete(
        self, prompt: Sequence[int], num_tokens: int, *, ignore_eos: bool = True
    ) -> Completion:
        """Greedy continuation of ``prompt`` (token ids), without llama.cpp's prompt cache."""
        reply: Any = self._server.handle_completions(
            {
                "prompt": list(prompt),
                "n_predict": num_tokens,
                "temperature": 0,
                "ignore_eos": ignore_eos,
                "return_tokens": True,
                "verbose": True,  # the only reply that carries the generated ids
                "cache_prompt": False,
            }
        )
        if isinstance(reply, str | bytes):
            reply = json.loads(reply)
        timings = reply["timings"]
        return Completion(
            list(reply["__verbose"]["tokens"]),
            timings["prompt_per_second"],
            timings["predicted_per_second"],
        )

    def complete_together(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Run all prompts at once; generated tokens per second of wall-clock time."""
        counts: list[int] = []

        def one(prompt: Sequence[int]) -> None:
            counts.append(len(self.complete(prompt, num_tokens).token_ids))

        threads = [threading.Thread(target=one, args=(p,)) for p in prompts]
        start = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return sum(counts) / (time.perf_counter() - start)


def write_float32_copy(source: Path, target: Path) -> None:
    """Write ``source`` with every tensor dequantised to float32.

    llama.cpp rounds activations to 8 bits for quantised weights and not for float32 ones, so only
    this copy says which tokens the weights themselves mean.
    """
    reader = gguf.GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch)
    for key, item in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value: Any = 0 if key == "general.file_type" else item.contents()
        kind = item.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, value, kind, sub_type=item.types[-1])
        else:
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(
            tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
