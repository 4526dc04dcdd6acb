// Attention of one new token for each sequence over sealed pages of nvfp4k-fp8v: heads of 128, pages of 64.
//
// What headrace/ops/triton/sealed_decode.py does in Triton, for the one case whose instruction stream binds
// there (docs/adr/0007). Compiled at run time; GROUP (query heads of a key head, 1 to 8) and RANK (0 or 4)
// are defined by the caller.
//
// A warp takes a part of whole pages by itself: its own ring of STAGES pages in shared memory, filled by bulk
// copies, its own softmax, no barrier with other warps. Products are m16n8k16 with operands swapped,
// S^T = K Q^T and O^T = V^T P^T. The order of a contraction is free, so channels and tokens are dealt to the
// lanes of a quad as 16 consecutive bytes each: every load from shared memory is 16 bytes wide.
//
// The last warp of a sequence's first block attends to what is in bfloat16, the first keys and the row's own
// page, in float32 on the ordinary pipes, while the others stream.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DIM 128
#define PAGE 64
#define FIRST 16
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef TAU
#define TAU 8.0f
#endif
#ifndef UNPACK
#define UNPACK 1
#endif
#define NOTHING -1.0e30f
#define MINUS_INFINITY __int_as_float(0xFF800000)
#define KEY_NBYTES (PAGE * DIM / 2)
#define VALUE_NBYTES (PAGE * DIM)
#define STEP_NBYTES (PAGE * DIM / 16)
#define LEFT_NBYTES (PAGE * RANK)
#define PAGE_NBYTES (KEY_NBYTES + VALUE_NBYTES + STEP_NBYTES + LEFT_NBYTES)
#define BATCH 16  // pages whose r . q one product computes

struct Lane {  // a warp's own shared memory
    alignas(128) u8 page[STAGES][PAGE_NBYTES];
    float shift[BATCH][8];  // r . q by page and head
    float2 scale[BATCH];    // of keys, of values
    u64 full[STAGES];
};

struct Shared {
    Lane lane[WARPS];
    float query[8][DIM];  // in units of log 2, zero beyond GROUP
    float turned[8][4];   // U q / 8
    float rest[32][8];    // the extra warp's probabilities
};
#ifdef SHARED_NBYTES
static_assert(sizeof(Shared) == SHARED_NBYTES, "the launch must ask for as much as there is");
#endif

#ifndef ON_CPU  // tests bring these along for a CPU
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 half2_of(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 e4m3x2(u32 two) {  // two E4M3 in the low 16 bits -> float16x2, exactly
    u32 d;
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %1; cvt.rn.f16x2.e4m3x2 %0, x; }" : "=r"(d) : "r"(two));
    return d;
}

__device__ __forceinline__ u32 e4m3x2_high(u32 four) {
    u32 d;
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %1; cvt.rn.f16x2.e4m3x2 %0, y; }" : "=r"(d) : "r"(four));
    return d;
}

__device__ __forceinline__ float2 floats(u32 half2) {
    float2 d;
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y; }"
        : "=f"(d.x), "=f"(d.y)
        : "r"(half2));
    return d;
}

__device__ __forceinline__ float2 bfloats(u32 two) {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
}

__device__ __forceinline__ float exp2_of(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

__device__ __forceinline__ u32 transposed(u32 x) {  // an 8 x 8 tile of float16, two to a lane
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
    return d;
}

__device__ __forceinline__ void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void product8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// What the kernel ahead wrote may be read from here on, where this one was started before its end.
__device__ __forceinline__ void wait_for_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may be started once every block has come here, so that its start costs no time.
__device__ __forceinline__ void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Pages come by bulk copies, which count their bytes at a barrier of the stage.
__device__ __forceinline__ void set_up(Lane& lane) {
    if (threadIdx.x % 32 < STAGES)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&lane.full[threadIdx.x % 32])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(Lane& lane, int stage) {
    u32 barrier = address(&lane.full[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(PAGE_NBYTES) : "memory");
}

__device__ __forceinline__ void copy(Lane& lane, int stage, u32 at, const u8* from, u32 nbytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address(lane.page[stage]) + at),
        "l"(from), "r"(nbytes), "r"(address(&lane.full[stage]))
        : "memory");
}

__device__ __forceinline__ void wait(Lane& lane, int stage, u32 parity) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }"
        ::"r"(address(&lane.full[stage])), "r"(parity)
        : "memory");
}
#endif

// Eight E2M1 and the float16 scale of both halves -> four float16x2, times 2^-7: channels (in bytes of the
// word, l: low nibbles, h: high) l0 l1, l2 l3, h0 h1, h2 h3 with UNPACK 1; l0 l2, l1 l3, h0 h2, h1 h3 with 0.
__device__ __forceinline__ void unpack(u32 (&h)[4], u32 w, u32 scale) {
#if UNPACK == 1
    u32 low = ((w << 4) & 0x80808080u) | ((w << 2) & 0x1C1C1C1Cu);
    u32 high = (w & 0x80808080u) | ((w >> 2) & 0x1C1C1C1Cu);
    h[0] = mul2(e4m3x2(low), scale);
    h[1] = mul2(e4m3x2_high(low), scale);
    h[2] = mul2(e4m3x2(high), scale);
    h[3] = mul2(e4m3x2_high(high), scale);
#else
    h[0] = mul2(((w << 12) & 0x80008000u) | ((w << 9) & 0x0E000E00u), scale);
    h[1] = mul2(((w << 4) & 0x80008000u) | ((w << 1) & 0x0E000E00u), scale);
    h[2] = mul2(((w << 8) & 0x80008000u) | ((w << 5) & 0x0E000E00u), scale);
    h[3] = mul2((w & 0x80008000u) | ((w >> 3) & 0x0E000E00u), scale);
#endif
}
#if UNPACK == 1
#define SCALE_UP 0x38003800u  // 0.5: codes come out times 2^-6, and 2^-7 is what scores expect
#define SECOND 1              // the channel, from the first, of a pair's second
#define NEXT 2                // and of the next pair's first
#else
#define SCALE_UP 0x58005800u  // 128: codes come out times 2^-14
#define SECOND 2
#define NEXT 1
#endif

__device__ __forceinline__ uint4 read16(const u8* at) { return *(const uint4*)at; }

struct Where {  // pages of this warp's parts, one after the other
    int part, page, end;
};

struct Call {
    const float* q;
    const u8 *key_codes, *key_scales, *key_residuals;
    const u16* key_refs;
    const u8* value_codes;
    const float2* page_scales;
    const u16* first_keys;
    const float* directions;
    const u16 *open_keys, *open_values;
    const int *tables, *open_pages, *context_lens;
    float2* sums;  // [rows, heads, slots]: maximum, sum
    float* mixed;  // [rows, heads, slots, DIM]
    float scale;
    int window, kv_heads, stride_table, stride_pages, num_shared, open_offset, min_part, max_parts, slots;
};

__device__ __forceinline__ int part_size(int pages, int min_part, int max_parts) {
    int size = min_part;
    while (size * max_parts < pages) size *= 2;
    return size;
}

__device__ __forceinline__ void fill(const Call& call, Lane& lane, int stage, u64 block) {
    expect(lane, stage);
    copy(lane, stage, 0, call.key_codes + block * KEY_NBYTES, KEY_NBYTES);
    copy(lane, stage, KEY_NBYTES, call.value_codes + block * VALUE_NBYTES, VALUE_NBYTES);
    copy(lane, stage, KEY_NBYTES + VALUE_NBYTES, call.key_scales + block * STEP_NBYTES, STEP_NBYTES);
#if RANK
    copy(
        lane, stage, KEY_NBYTES + VALUE_NBYTES + STEP_NBYTES, call.key_residuals + block * LEFT_NBYTES, LEFT_NBYTES);
#endif
}

// First keys and the row's own page: one warp, a token a lane, then four channels a lane. Slot 0.
struct Rest {
    float top[GROUP], total[GROUP], out[GROUP][4];

    // Up to 32 keys, rows of ``keys``, of which this lane's is ``t``; ``count``: how many values follow, the
    // first of them at ``values`` (bfloat16 rows), or in ``codes`` (E4M3, a page's columns) in units of ``unit``.
    __device__ void absorb(
        Shared& s, const u16* keys, int t, bool seen, const u16* values, const u8* codes, float unit, int count) {
        int lane = threadIdx.x % 32;
        float score[GROUP];
#pragma unroll
        for (int h = 0; h < GROUP; h++) score[h] = 0.0f;
        if (seen) {
            const uint4* key = (const uint4*)(keys + (u64)t * DIM);
#pragma unroll 4
            for (int i = 0; i < DIM / 8; i++) {
                uint4 eight = key[i];
                u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 two = bfloats(words[j]);
#pragma unroll
                    for (int h = 0; h < GROUP; h++) {
                        float2 q = *(const float2*)&s.query[h][8 * i + 2 * j];
                        score[h] = fmaf(two.x, q.x, fmaf(two.y, q.y, score[h]));
                    }
                }
            }
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            float x = seen ? score[h] : MINUS_INFINITY, most = x;
            for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
            most = fmaxf(most, top[h]);
            float weight = exp2_of(x - most), shrink = exp2_of(top[h] - most), sum = weight;
            for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
            top[h] = most;
            total[h] = total[h] * shrink + sum;
            s.rest[lane][h] = weight;
#pragma unroll
            for (int i = 0; i < 4; i++) out[h][i] *= shrink;
        }
        __syncwarp();
#pragma unroll 4
        for (int j = 0; j < count; j++) {
            float value[4];
            if (codes) {
#pragma unroll
                for (int i = 0; i < 4; i++) value[i] = floats(e4m3x2(codes[(4 * lane + i) * PAGE + j])).x * unit;
            } else {
                uint2 two = *(const uint2*)(values + (u64)j * DIM + 4 * lane);
                float2 a = bfloats(two.x), b = bfloats(two.y);
                value[0] = a.x, value[1] = a.y, value[2] = b.x, value[3] = b.y;
            }
#pragma unroll
            for (int h = 0; h < GROUP; h++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[h][i] = fmaf(s.rest[j][h], value[i], out[h][i]);
        }
        __syncwarp();
    }
};

__device__ void rest(const Call& call, Shared& s, int row, int head, int context, int begin, const int* table) {
    int lane = threadIdx.x % 32, own = (context - 1) / PAGE;
    Rest sum;
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        sum.top[h] = NOTHING;
        sum.total[h] = 0.0f;
        for (int i = 0; i < 4; i++) sum.out[h][i] = 0.0f;
    }
    if (own > 0 && begin < FIRST) {
        u64 block = (u64)table[0] * call.kv_heads + head;
        sum.absorb(
            s, call.first_keys + block * FIRST * DIM, lane, lane < FIRST && lane >= begin, nullptr,
            call.value_codes + block * VALUE_NBYTES, call.page_scales[block].y, FIRST);
    }
    int slot = call.open_pages[(u64)row * call.stride_pages];
    if (slot >= call.num_shared) slot += call.open_offset;
    u64 at = ((u64)slot * call.kv_heads + head) * PAGE * DIM;
    int from = max(begin - own * PAGE, 0), to = context - own * PAGE;
    for (int tile = from / 32 * 32; tile < to; tile += 32) {
        int t = tile + lane;
        sum.absorb(
            s, call.open_keys + at, t, t >= from && t < to, call.open_values + at + (u64)tile * DIM, nullptr,
            1.0f, min(32, to - tile));
    }
#pragma unroll
    for (int h = 0; h < GROUP; h++) {
        u64 place = ((u64)row * call.kv_heads * GROUP + head * GROUP + h) * call.slots;
        if (lane == 0) call.sums[place] = make_float2(sum.top[h], sum.total[h]);
        *(float4*)(call.mixed + place * DIM + 4 * lane) =
            make_float4(sum.out[h][0], sum.out[h][1], sum.out[h][2], sum.out[h][3]);
    }
}

// r . q of up to 16 pages from ``page`` on, and their scales, to shared memory.
__device__ __forceinline__ void shifts(
    const Call& call, Lane& mine, const u32 (&query)[8][2], const int* table, int head, int page, int end) {
    int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u64 block[2];
    uint4 ref[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        block[i] = (u64)table[min(page + g + 8 * i, end - 1)] * call.kv_heads + head;
        const uint4* at = (const uint4*)(call.key_refs + block[i] * DIM + 16 * c);
        ref[i][0] = at[0], ref[i][1] = at[1], ref[i][2] = at[8], ref[i][3] = at[9];
    }
    if (c < 2) mine.scale[g + 8 * c] = call.page_scales[c ? block[1] : block[0]];
#pragma unroll
    for (int w = 0; w < 4; w++) {  // channels 16 c + 4 w to + 3, and the same + 64
        u32 a[2][2][2];            // half, pair, row
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4& eight = ref[i][2 * half + w / 2];
                float2 x = bfloats(w % 2 ? eight.z : eight.x), y = bfloats(w % 2 ? eight.w : eight.y);
                a[half][0][i] = SECOND == 1 ? half2_of(x.x, x.y) : half2_of(x.x, y.x);
                a[half][1][i] = SECOND == 1 ? half2_of(y.x, y.y) : half2_of(x.y, y.y);
            }
#pragma unroll
        for (int half = 0; half < 2; half++)
            product(sum, a[half][0][0], a[half][0][1], a[half][1][0], a[half][1][1], query[2 * w + half][0], query[2 * w + half][1]);
    }
    __syncwarp();
    *(float2*)&mine.shift[g][2 * c] = make_float2(sum[0], sum[1]);
    *(float2*)&mine.shift[g + 8][2 * c] = make_float2(sum[2], sum[3]);
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, BLOCKS) sealed_decode(const Call call) {
    SHARED_MEMORY(memory);
    Shared& s = *(Shared*)memory;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int head = blockIdx.y, row = blockIdx.z;
    int context = call.context_lens[row];
    int begin = max(context - call.window, 0);
    int own = (context - 1) / PAGE, first = begin / PAGE;
    const int* table = call.tables + (u64)row * call.stride_table;

    for (int i = threadIdx.x; i < 8 * DIM; i += 32 * WARPS + 32) {
        int h = i / DIM;
        float x = h < GROUP ? call.q[((u64)row * call.kv_heads * GROUP + head * GROUP) * DIM + i] : 0.0f;
        s.query[h][i % DIM] = x * call.scale;
    }
    if (warp < WARPS) set_up(s.lane[warp]);
    start_next_kernel();
    __syncthreads();
#if RANK
    for (int i = warp; i < 32; i += WARPS + 1) {  // a warp a sum
        int h = i / 4, r = i % 4;
        float4 u = *(const float4*)(call.directions + ((u64)head * RANK + r) * DIM + 4 * lane);
        float4 q = *(const float4*)&s.query[h][4 * lane];
        float x = u.x * q.x + u.y * q.y + u.z * q.z + u.w * q.w;
        for (int j = 16; j; j /= 2) x += __shfl_xor_sync(~0u, x, j);
        if (lane == 0) s.turned[h][r] = x * 0.125f;
    }
    __syncthreads();
#endif
    if (warp == WARPS) {
        if (blockIdx.x == 0) rest(call, s, row, head, context, begin, table);
        return;
    }

    Lane& mine = s.lane[warp];
    int pages = own - first;  // sealed ones
    int size = part_size(pages, call.min_part, call.max_parts), parts = (pages + size - 1) / size;
    int step = gridDim.x * WARPS;
    auto start_of = [&](int part) {
        int page = first + part * size;
        return Where{part, page, part < parts ? min(page + size, own) : page};
    };
    auto advance = [&](Where at) { return at.page + 1 < at.end ? Where{at.part, at.page + 1, at.end} : start_of(at.part + step); };
    auto block_at = [&](Where at) -> long long { return at.part < parts ? (long long)table[at.page] * call.kv_heads + head : -1; };

    Where now = start_of(blockIdx.x * WARPS + warp), ahead = now;
    if (now.part >= parts) return;
    long long next = block_at(ahead);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        long long block = next;
        ahead = ahead.part < parts ? advance(ahead) : ahead;
        next = block_at(ahead);
        if (block >= 0 && lane == 0) fill(call, mine, stage, block);
    }

    u32 query[8][2], turned = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float* from = &s.query[g][16 * c + 4 * (i / 2) + 64 * (i % 2)];
        query[i][0] = half2_of(from[0], from[SECOND]);
        query[i][1] = half2_of(from[NEXT], from[NEXT + SECOND]);
    }
#if RANK
    if (c < 2) turned = half2_of(s.turned[g][2 * c], s.turned[g][2 * c + 1]);
#endif

    float top[2] = {NOTHING, NOTHING}, total[2] = {0.0f, 0.0f}, unit = 1.0f;
    float out[8][4];
#pragma unroll
    for (int m = 0; m < 8; m++)
        for (int i = 0; i < 4; i++) out[m][i] = 0.0f;
    int stage = 0, batch = 0;
    u32 parity = 0;
    int hidden = max(begin, FIRST);

    while (true) {
        if (batch == 0) shifts(call, mine, query, table, head, now.page, now.end);
        float2 shift = *(const float2*)&mine.shift[batch][2 * c];
        float2 scale = mine.scale[batch];
        wait(mine, stage, parity);
        const u8* page = mine.page[stage];

        float score[4][4];
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {  // tokens 16 (g / 2) + 4 tile + g % 2, and the same + 2
            int token = 16 * (g / 2) + 4 * tile + g % 2;
            float(&sum)[4] = score[tile];
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
            u32 steps[2][2];
            uint4 codes[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                codes[i] = read16(page + (token + 2 * i) * (DIM / 2) + 16 * c);
                u32 two = *(const u16*)(page + KEY_NBYTES + VALUE_NBYTES + (token + 2 * i) * (DIM / 16) + 2 * c);
                two = mul2(e4m3x2(two), SCALE_UP);
                steps[i][0] = __byte_perm(two, 0, 0x1010);
                steps[i][1] = __byte_perm(two, 0, 0x3232);
            }
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 a[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 word = w == 0 ? codes[i].x : w == 1 ? codes[i].y : w == 2 ? codes[i].z : codes[i].w;
                    unpack(a[i], word, steps[i][w / 2]);
                }
                product(sum, a[0][0], a[1][0], a[0][1], a[1][1], query[2 * w][0], query[2 * w][1]);
                product(sum, a[0][2], a[1][2], a[0][3], a[1][3], query[2 * w + 1][0], query[2 * w + 1][1]);
            }
#if RANK
            const u8* left = page + KEY_NBYTES + VALUE_NBYTES + STEP_NBYTES + token * RANK + 2 * (c & 1);
            product8(sum, e4m3x2(*(const u16*)left), e4m3x2(*(const u16*)(left + 2 * RANK)), turned);
#endif
        }
        float g128 = scale.x * 128.0f;
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) score[tile][i] = fmaf(score[tile][i], g128, i % 2 ? shift.y : shift.x);
        int unseen = hidden - now.page * PAGE;
        if (unseen > 0) {
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (16 * (g / 2) + 4 * tile + g % 2 + 2 * (i / 2) < unseen) score[tile][i] = MINUS_INFINITY;
        }
        float most[2] = {score[0][0], score[0][1]};
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) most[i % 2] = fmaxf(most[i % 2], score[tile][i]);
        // The maximum stays until a score exceeds it by TAU: probabilities reach 2^TAU, which float16 holds.
        float shrink[2] = {unit / scale.y, unit / scale.y};
        if (__any_sync(~0u, most[0] > top[0] + TAU || most[1] > top[1] + TAU)) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x = fmaxf(most[i], top[i]);
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
                float less = exp2_of(top[i] - x);
                top[i] = x;
                total[i] *= less;
                shrink[i] *= less;
            }
        }
        unit = scale.y;
        if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int m = 0; m < 8; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][i] *= shrink[i % 2];
        }
        u32 weight[4][2];
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                score[tile][i] = exp2_of(score[tile][i] - top[i % 2]);
                total[i % 2] += score[tile][i];
            }
            weight[tile][0] = transposed(half2_of(score[tile][0], score[tile][1]));
            weight[tile][1] = transposed(half2_of(score[tile][2], score[tile][3]));
        }
#pragma unroll
        for (int m = 0; m < 8; m++) {  // channels 16 m + g, and the same + 8
            const u8* at = page + KEY_NBYTES + (16 * m + g) * PAGE + 16 * c;
            uint4 a = read16(at), b = read16(at + 8 * PAGE);
#pragma unroll
            for (int tile = 0; tile < 4; tile++) {
                u32 x = tile == 0 ? a.x : tile == 1 ? a.y : tile == 2 ? a.z : a.w;
                u32 y = tile == 0 ? b.x : tile == 1 ? b.y : tile == 2 ? b.z : b.w;
                product(out[m], e4m3x2(x), e4m3x2(y), e4m3x2_high(x), e4m3x2_high(y), weight[tile][0], weight[tile][1]);
            }
        }
        __syncwarp();
        if (next >= 0 && lane == 0) fill(call, mine, stage, next);
        if (ahead.part < parts) {
            ahead = advance(ahead);
            next = block_at(ahead);
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
        batch = (batch + 1) % BATCH;

        if (now.page + 1 < now.end) {
            now.page++;
            continue;
        }
        // The part's end: its sums and output, and a fresh start.
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x = total[i];
            x += __shfl_xor_sync(~0u, x, 4);
            x += __shfl_xor_sync(~0u, x, 8);
            x += __shfl_xor_sync(~0u, x, 16);
            if (2 * c + i < GROUP) {
                u64 place = ((u64)row * call.kv_heads * GROUP + head * GROUP + 2 * c + i) * call.slots + now.part + 1;
                if (g == 0) call.sums[place] = make_float2(top[i], x);
                float* to = call.mixed + place * DIM + g;
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    to[16 * m] = out[m][i] * unit;
                    to[16 * m + 8] = out[m][2 + i] * unit;
                }
            }
        }
        now = start_of(now.part + step);
        if (now.part >= parts) return;
        batch = 0;
        unit = 1.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = NOTHING, total[i] = 0.0f;
#pragma unroll
        for (int m = 0; m < 8; m++)
            for (int i = 0; i < 4; i++) out[m][i] = 0.0f;
    }
}

// The parts of one row and head by their log-sum-exp, with the sink: 4 x 128 threads.
extern "C" __global__ void __launch_bounds__(512) sealed_merge(
    const float2* sums, const float* mixed, const float* sinks, float* out, const int* context_lens, int window,
    int min_part, int max_parts, int slots, int has_sinks) {
    __shared__ float share[512], pieces[4][DIM], warps[16];
    int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, i = threadIdx.x;
    wait_for_kernel();
    int context = context_lens[row];
    int pages = (context - 1) / PAGE - max(context - window, 0) / PAGE;
    int size = part_size(pages, min_part, max_parts), count = (pages + size - 1) / size + 1;
    u64 place = ((u64)row * heads + head) * slots;
    float2 sum = i < count ? sums[place + i] : make_float2(MINUS_INFINITY, 0.0f);
    float sink = has_sinks ? sinks[head] * 1.4426950408889634f : MINUS_INFINITY;
    float most = fmaxf(sum.x, sink);
    for (int j = 16; j; j /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, j));
    if (i % 32 == 0) warps[i / 32] = most;
    __syncthreads();
    most = warps[0];
    for (int j = 1; j < 16; j++) most = fmaxf(most, warps[j]);
    float mine = exp2_of(sum.x - most);
    share[i] = mine;
    float total = sum.y * mine;
    for (int j = 16; j; j /= 2) total += __shfl_xor_sync(~0u, total, j);
    __syncthreads();
    if (i % 32 == 0) warps[i / 32] = total;
    int d = i % DIM, quarter = i / DIM;
    float x = 0.0f;
#pragma unroll 8
    for (int j = quarter; j < count; j += 4) x = fmaf(mixed[(place + j) * DIM + d], share[j], x);
    pieces[quarter][d] = x;
    __syncthreads();
    if (i < DIM) {
        total = exp2_of(sink - most);
        for (int j = 0; j < 16; j++) total += warps[j];
        out[((u64)row * heads + head) * DIM + d] = (pieces[0][d] + pieces[1][d] + pieces[2][d] + pieces[3][d]) / total;
    }
}
