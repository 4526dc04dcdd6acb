// What expert_whole.cu is made of: geometry, instructions, rows of MXFP4 times activations.
// A part of its program; expert_whole.cu tells how it works.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Blocks of 32 weights and bytes of a row, and what a tile of 16 rows has: of gate and up (1), and of down (2).
#define BLOCKS1 (HIDDEN / 32)
#define ROW1 (HIDDEN / 2)
#define CODES1 (16 * ROW1)
#define SCALES1 (16 * BLOCKS1)
#define TILES1 (2 * WIDTH / 16)
#define BLOCKS2 (WIDTH / 32)
#define ROW2 (WIDTH / 2)
#define CODES2 (16 * ROW2)
#define SCALES2 (16 * BLOCKS2)
#define TILES2 (HIDDEN / 16)
// A unit is four blocks of a row, one for each lane of four. Of a row of gate and up each warp takes UNITS1.
#define UNITS1 (((BLOCKS1 + 3) / 4 + WARPS - 1) / WARPS)
#define UNITS2 ((BLOCKS2 + 3) / 4)
#define BIAS (HAS_BIAS * 16 * 4)  // of a tile
// Bytes of a stage: a tile of gate and up, or CHUNK tiles of down; codes, scales and biases one after another.
#define NBYTES1 (CODES1 + SCALES1 + BIAS)
#define NBYTES2 (CHUNK * (CODES2 + SCALES2 + BIAS))
#define STAGE (((NBYTES1 > NBYTES2 ? NBYTES1 : NBYTES2) + 127) / 128 * 128)
#define RESULTS 4            // tiles' sums on their way from the warps to the one that adds them up
#define BEYOND 64            // bytes that a last row's last unit may read beyond its stage
#define RESULT 1048576.0f    // 2^20, undoes HALF_SCALE and the 2^-14 of codes read as float16
#define HALF_SCALE 0.015625f // of activations before they are cut into two float16
#define SECOND 2048.0f       // of the second of them
#define SUMS 2               // that the products of a unit go into in turn: each waits for the one before in its sum
#define MOST_THREADS 512     // keeps registers to 128, so that small kernels fit beside this one

#define CHUNKS ((TILES2 + CHUNK - 1) / CHUNK)
#define H_NBYTES (WIDTH * 2)
#define ENTRIES 32  // that a block keeps at hand
#define END -1      // instead of a piece of work

struct Shared {
    alignas(128) u8 stage[STAGES][STAGE];
    u8 beyond[BEYOND];
    alignas(128) u16 h[STAGES][2][WIDTH];  // of a run of down's first pair
    float4 sums[RESULTS][WARPS][16];  // of each warp, of four lanes: gates, then ups
    float biases[RESULTS][16];
    int4 entries[ENTRIES];
    int work[STAGES], sums_of[RESULTS];
    u64 known[STAGES], full[STAGES], h_full[STAGES], free[STAGES], sums_full[RESULTS], sums_free[RESULTS];
    u64 closed;
};
static_assert(sizeof(Shared) <= SHARED_NBYTES, "the launch must ask for as much as there is");

#ifndef ON_CPU  // tests bring these along for a CPU
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barriers_are_set_up() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64& barrier, u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(nbytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u64& barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }"
        ::"r"(address(&barrier)), "r"(parity)
        : "memory");
}

// Weights are read once: they shall not drive from the second-level cache what is read again.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void bulk_copy(void* to, const u8* from, u32 nbytes, u64& barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(address(to)), "l"(from), "r"(nbytes), "r"(address(&barrier)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 nbytes, u64& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(address(to)), "l"(from), "r"(nbytes), "r"(address(&barrier))
                 : "memory");
}

// What this thread may read, bulk copies that it starts later may read, too.
__device__ __forceinline__ void copies_see_memory() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Ask for the line of an address before somebody waits for it: from memory, or from the second-level cache.
__device__ __forceinline__ void ask(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Add to *p, after everything that this thread, or one that it has met at a barrier, wrote before.
__device__ __forceinline__ void add_released(int* p, int more) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(more) : "memory");
}

// What others wrote before they added to *p may be read after this.
__device__ __forceinline__ int acquired(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ u64 clock_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ u32 select_bits(u32 ones, u32 zeros, u32 mask) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(d) : "r"(ones), "r"(zeros), "r"(mask));
    return d;
}

__device__ __forceinline__ void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 half_of(float x) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

__device__ __forceinline__ float float_of(u16 h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

// What the kernel ahead wrote may be read from here on, where this one was started before its end.
__device__ __forceinline__ void wait_for_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel may be started once every block has come here, so that its start costs no time.
__device__ __forceinline__ void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// Eight E2M1 -> four float16x2 of codes n and n + 4, times 2^-14, exactly: E2M1's bits are float16's at sign 15,
// exponent 11 to 10, mantissa 9.
__device__ __forceinline__ void unpack(u32 (&p)[4], u32 w) {
    u32 odd = select_bits(w, w >> 3, 0x80808080u);
    u32 even = select_bits(w << 4, w << 1, 0x80808080u);
    p[0] = (even << 8) & 0x8E008E00u;
    p[1] = (odd << 8) & 0x8E008E00u;
    p[2] = even & 0x8E008E00u;
    p[3] = odd & 0x8E008E00u;
}

__device__ __forceinline__ void words_of(u32* words, uint4 q) {
    words[0] = q.x;
    words[1] = q.y;
    words[2] = q.z;
    words[3] = q.w;
}

// A unit of an activation's halves, from ``block`` on: this lane's part of the product's columns. Columns 2 t and
// 2 t + 1 hold both terms of what lane t of four multiplies, and are zero in the others' rows.
template <int BLOCKS>
__device__ __forceinline__ void load_halves(u32 (&b)[16], const u16* halves, int stride, int first) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = first + t;
    bool mine = g / 2 == t && block < BLOCKS;
    const uint4* at = (const uint4*)(halves + g % 2 * stride + block * 32);
#pragma unroll
    for (int i = 0; i < 4; i++) words_of(b + 4 * i, mine ? at[i] : make_uint4(0, 0, 0, 0));
}

// Add a unit of rows 2 g and 2 g + 1 of a tile, from ``block`` on, times those halves. Beyond a row's end are other
// bytes of the slice or the stage; their halves are zero, and so are their scales, which might be infinite.
template <int ROW, int BLOCKS>
__device__ __forceinline__ void add_unit(float2& sum, const u8* codes, const u8* scales, const u32 (&b)[16], int first) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, block = first + t;
    const u8* code = codes + 2 * g * ROW + block * 16;
    const u8* scale = scales + 2 * g * BLOCKS + block;
    bool inside = block < BLOCKS;
    u32 low[4], high[4];
    words_of(low, *(const uint4*)code);
    words_of(high, *(const uint4*)(code + ROW));
    u32 e0 = scale[0], e1 = scale[BLOCKS];
    float d[SUMS][4] = {}, *c = d[0];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 p[4], q[4];
        unpack(p, low[w]);
        unpack(q, high[w]);
        product(d[2 * w % SUMS], p[0], q[0], p[1], q[1], b[4 * w], b[4 * w + 1]);
        product(d[(2 * w + 1) % SUMS], p[2], q[2], p[3], q[3], b[4 * w + 2], b[4 * w + 3]);
    }
#pragma unroll
    for (int i = 0; i < 4 * (SUMS - 1); i++) c[i % 4] += d[1 + i / 4][i % 4];
    sum.x += (c[0] + c[1] * (1.0f / SECOND)) * (inside ? __uint_as_float(e0 << 23) : 0.0f);
    sum.y += (c[2] + c[3] * (1.0f / SECOND)) * (inside ? __uint_as_float(e1 << 23) : 0.0f);
}

__device__ __forceinline__ float2 over_four_lanes(float2 sum) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
        sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
    }
    return sum;
}

__device__ __forceinline__ float gated(float gate, float up) {
#if CLAMPED
    float g = fminf(gate, LIMIT), u = fminf(fmaxf(up, -LIMIT), LIMIT);
    return g / (1.0f + __expf(-ALPHA * g)) * (u + 1.0f);
#else
    return gate / (1.0f + __expf(-gate)) * up;
#endif
}

// Store one of the eight columns of a tile as halves, in the order in which a word's codes come apart.
__device__ __forceinline__ void store_halves(u16* halves, int stride, int column, float x) {
    float scaled = x * HALF_SCALE;
    u16 first = half_of(scaled);
    halves += column % 4 * 2 + column / 4;
    halves[0] = first;
    halves[stride] = half_of((scaled - float_of(first)) * SECOND);
}
