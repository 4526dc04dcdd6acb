from collections.abc import Sequence

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...

class Experts: ...
class Cache: ...
class AttentionBlock: ...
class DenseBlock: ...
class SlabLayout: ...

class ExpertService:
    def __init__(
        self,
        layouts: Sequence[SlabLayout],
        bases: Sequence[int],
        num_experts: int,
        kind: int,
        alpha: float,
        limit: float,
        block: int,
        fields: Sequence[int],
        threads: int,
        cpus: Sequence[int],
        idle_s: float,
        stall_s: float,
        /,
    ) -> None: ...
    def start(self) -> None: ...
    def stop(self, timeout_s: float, /) -> bool: ...
    def running(self) -> bool: ...
    def wake(self) -> None: ...
    def heartbeat(self) -> int: ...
    def awake(self) -> int: ...
    def stats(self) -> tuple[int, int, int, float, float, float]: ...
    def request(self, timeout_s: float, /) -> float: ...
    def set_reading(self, rows: int, near_nbytes: int, far_nbytes: int, /) -> None: ...
    def set_tile_use(
        self, tokens: int, pairs: int, narrow_pairs: int, block_pairs: int, /
    ) -> None: ...
    def set_read_only(self, on: bool, /) -> None: ...
    def set_helping(self, on: bool, /) -> None: ...
    def set_yielding(self, on: bool, /) -> None: ...
    def start_log(self, rows: int, rounds: int, /) -> None: ...
    def stop_log(self) -> None: ...
    def inject(self, fault: int, worker: int, /) -> None: ...

def make_slab_layout(
    format: int,
    down_format: int,
    sizes: Sequence[int],
    block_factors: bool,
    parts: Sequence[tuple[int, int]],
    /,
) -> SlabLayout: ...
def run_experts(
    layout: SlabLayout,
    base: int,
    num_experts: int,
    kind: int,
    alpha: float,
    limit: float,
    sizes: Sequence[int],
    fields: Sequence[int],
    threads: int,
    /,
) -> int: ...
def expert_isa() -> str: ...
def keep_forever(value: object, /) -> None: ...
def make_attention_block(
    norm: int,
    eps: float,
    qkvo: Sequence[Matrix],
    biases: Sequence[int],
    norms: Sequence[int],
    widths: Sequence[int],
    cos: int,
    sin: int,
    positions: int,
    half: int,
    interleaved: bool,
    heads: Sequence[int],
    scale: float,
    window: int,
    sinks: int,
    /,
) -> AttentionBlock: ...
def attention_block(
    block: AttentionBlock,
    cache: Cache,
    x: int,
    out: int,
    tokens: int,
    positions: int,
    slots: int,
    query_start: int,
    block_tables: int,
    sequences: int,
    table_width: int,
    seconds: int,
    /,
) -> int: ...
def make_dense_block(
    norm: int,
    eps: float,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    kind: int,
    alpha: float,
    limit: float,
    /,
) -> DenseBlock: ...
def dense_block(block: DenseBlock, x: int, tokens: int, out: int, seconds: int, /) -> None: ...
def make_matrix(
    format: int,
    rows: int,
    cols: int,
    data: int,
    row_nbytes: int,
    scales: int,
    scale_row_nbytes: int,
    global_scale: float,
    block_scale: int,
    block_scale_row: int,
    /,
) -> Matrix: ...
def make_experts(
    gate: Sequence[Matrix],
    up: Sequence[Matrix],
    down: Sequence[Matrix],
    gate_bias: int,
    up_bias: int,
    down_bias: int,
    /,
) -> Experts: ...
def make_cache(
    keys: int,
    values: int,
    blocks: int,
    heads: int,
    block_tokens: int,
    head: int,
    block_stride: int,
    head_stride: int,
    token_stride: int,
    bf16: bool,
    /,
) -> Cache: ...
def linear(weight: Matrix, x: int, tokens: int, out: int, bias: int, residual: int, /) -> None: ...
def tiled_linear(weight: Matrix, x: int, tokens: int, out: int, /) -> bool: ...
def linear_group(
    weights: Sequence[Matrix],
    x: int,
    tokens: int,
    outs: Sequence[int],
    biases: Sequence[int],
    /,
) -> None: ...
def gated_linear(
    gate: Matrix,
    up: Matrix,
    x: int,
    tokens: int,
    kind: int,
    alpha: float,
    limit: float,
    out: int,
    /,
) -> None: ...
def moe(
    experts: Experts,
    x: int,
    ids: int,
    weights: int,
    tokens: int,
    k: int,
    kind: int,
    alpha: float,
    limit: float,
    out: int,
    /,
) -> int: ...
def attention(
    cache: Cache,
    q: int,
    out: int,
    heads: int,
    scale: float,
    window: int,
    sinks: int,
    query_start: int,
    block_tables: int,
    positions: int,
    sequences: int,
    table_width: int,
    release: bool,
    /,
) -> int: ...
def dequantize(weight: Matrix, out: int, /) -> None: ...
def embed(weight: Matrix, ids: int, tokens: int, out: int, /) -> int: ...
def rmsnorm(x: int, weight: int, tokens: int, n: int, eps: float, out: int, /) -> None: ...
def rope(
    x: int,
    row_stride: int,
    tokens: int,
    heads: int,
    head: int,
    cos: int,
    sin: int,
    table_rows: int,
    half: int,
    interleaved: bool,
    positions: int,
    /,
) -> int: ...
def router_topk(
    logits: int,
    tokens: int,
    experts: int,
    k: int,
    softmax_first: bool,
    normalize: bool,
    ids: int,
    weights: int,
    /,
) -> None: ...
def kv_append(cache: Cache, k: int, v: int, tokens: int, slots: int, /) -> int: ...
def read(data: int, nbytes: int, /) -> float: ...
def multiply_adds(steps: int, /) -> int: ...
def exponential(x: int, n: int, out: int, /) -> None: ...
def set_num_threads(count: int, /) -> None: ...
def num_threads() -> int: ...
def select_isa(name: str, /) -> str: ...
def isa() -> str: ...
def supported_isas() -> str: ...
def why_no_tiles() -> str: ...
def read_bandwidth(
    data: int, nbytes: int, threads: int, cpus: Sequence[int], seconds: float, /
) -> float: ...
def answer_flags(seq: int, ack: int, count: int, timeout: float, /) -> int: ...

class SealedCache: ...
class OpenPages: ...

def make_sealed_cache(addresses: list[int], counts: list[int], /) -> SealedCache: ...
def make_open_pages(addresses: list[int], width: int, num_seals: int, /) -> OpenPages: ...
def sealed_append(
    cache: SealedCache, open_pages: OpenPages, k: int, v: int, tokens: int, /
) -> int: ...
def sealed_attention(
    cache: SealedCache,
    open_pages: OpenPages,
    addresses: list[int],
    heads: int,
    scale: float,
    window: int,
    sequences: int,
    table_width: int,
    /,
) -> int: ...
