"""Ids of the classes that a step of this engine is made of: the catalogue's, the profiler's ranges'.

Each is a record of the catalogue. Predictions (``step_cost``), measurements (ranges of the same
name) and the tables of `headrace explain` meet in these names.
"""

from __future__ import annotations

EMBED = "token-embedding"
RMSNORM = "rmsnorm"
QKV = "qkv-projection"
ROPE = "rope-rotation"
KV_APPEND = "kv-append"  # quantises where the cache is quantised
ATTENTION_DECODE = "decode-attention"
ATTENTION_PREFILL = "prefill-attention"
O_PROJECTION = "output-projection"
ROUTER = "moe-routing"  # the gate's matrix and the choice of k
EXPERTS_GPU = "moe-experts"  # also the experts of a machine without a GPU that lie in memory
EXPERTS_CPU = "cpu-expert-matvec"  # experts that the CPU computes beside a GPU
EXPERT_FETCH = "expert-fetch"
DENSE_FFN = "dense-ffn"
LM_HEAD = "lm-head"
SAMPLING = "sampling"
TOKENIZE = "template-tokenize"
STREAM_WRITE = "stream-write"
FLAG = "gpu-cpu-flag"
LAUNCHES = "step-launches"
SCHEDULE = "sched-iteration-level-scheduling"  # choosing, preparing and committing a batch
DETOKENIZE = "detokenization-stop-string-scan"

LEAVES = (
    EMBED,
    RMSNORM,
    QKV,
    ROPE,
    KV_APPEND,
    ATTENTION_DECODE,
    ATTENTION_PREFILL,
    O_PROJECTION,
    ROUTER,
    EXPERTS_GPU,
    EXPERTS_CPU,
    EXPERT_FETCH,
    DENSE_FFN,
    LM_HEAD,
    SAMPLING,
    TOKENIZE,
    STREAM_WRITE,
    FLAG,
    LAUNCHES,
    SCHEDULE,
    DETOKENIZE,
)
