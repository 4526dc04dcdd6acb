// What decoding over sealed pages is made of: a page's layout, the instructions, the cut into parts.
// A part of the program of sealed_decode.cu, which tells how it works.

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
#define TAU 8.0f  // log2 of how far a score may exceed the running maximum before it follows
#define NOTHING -1.0e30f
#define MINUS_INFINITY __int_as_float(0xFF800000)
#define KEY_NBYTES (PAGE * DIM / 2)
#define VALUE_NBYTES (PAGE * DIM)
#define STEP_NBYTES (PAGE * DIM / 16)
#define LEFT_NBYTES (PAGE * RANK)
#define REF_NBYTES (2 * DIM)
// Two pages' scales, of which one is read: copies are of 16 bytes at least. Beyond the last of an odd number
// lies memory that was allocated with them, since allocations are multiples of 512 bytes.
#define SCALE_NBYTES 16
// Where the parts of a page lie in shared memory.
#define VALUES KEY_NBYTES
#define STEPS (VALUES + VALUE_NBYTES)
#define LEFT (STEPS + STEP_NBYTES)
#define REF (LEFT + LEFT_NBYTES)
#define SCALES (REF + REF_NBYTES)
#define PAGE_NBYTES (SCALES + SCALE_NBYTES)

struct Lane {  // a warp's own shared memory
    alignas(128) u8 page[STAGES][PAGE_NBYTES];
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
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void product8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm(
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

__device__ __forceinline__ void to_cache(const void* from, u32 nbytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(nbytes) : "memory");
}

__device__ __forceinline__ void wait(Lane& lane, int stage, u32 parity) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }"
        ::"r"(address(&lane.full[stage])), "r"(parity)
        : "memory");
}
#endif

// Eight E2M1 and the float16 scale of both halves -> four float16x2, times 2^-7: low nibbles of bytes 0 1 and
// 2 3, high nibbles of the same. E2M1's bits are E4M3's times 2^-6 at sign 7, exponent 4 to 3, mantissa 2.
__device__ __forceinline__ void unpack(u32 (&h)[4], u32 w, u32 scale) {
    u32 low = ((w << 4) & 0x80808080u) | ((w << 2) & 0x1C1C1C1Cu);
    u32 high = (w & 0x80808080u) | ((w >> 2) & 0x1C1C1C1Cu);
    h[0] = mul2(e4m3x2(low), scale);
    h[1] = mul2(e4m3x2_high(low), scale);
    h[2] = mul2(e4m3x2(high), scale);
    h[3] = mul2(e4m3x2_high(high), scale);
}
#define HALF_OF_BOTH 0x38003800u  // what makes 2^-6 the 2^-7 that scores expect, a float16x2

__device__ __forceinline__ uint4 read16(const u8* at) { return *(const uint4*)at; }

struct Where {  // pages of this warp's parts, one after the other
    int part, page, end;
};

struct Cut {  // of a row's pages into parts, by their number alone
    int min_part, long_part, few_parts, max_parts;
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
    int window, kv_heads, stride_table, stride_pages, num_shared, open_offset, slots;
    Cut cut;
};

// Pages of a part: at least min_part; longer where a row would have more than few_parts, since each part's
// output is written and read again, but not beyond long_part before there are max_parts.
__device__ __forceinline__ int part_size(int pages, Cut cut) {
    int size = cut.min_part;
    while (size < cut.long_part && size * cut.few_parts < pages) size *= 2;
    while (size * cut.max_parts < pages) size *= 2;
    return size;
}

// Asks the second-level cache for the large parts of a page.
__device__ __forceinline__ void fetch(const Call& call, u64 block) {
    to_cache(call.key_codes + block * KEY_NBYTES, KEY_NBYTES);
    to_cache(call.value_codes + block * VALUE_NBYTES, VALUE_NBYTES);
}

__device__ __forceinline__ void fill(const Call& call, Lane& lane, int stage, u64 block) {
    expect(lane, stage);
    copy(lane, stage, 0, call.key_codes + block * KEY_NBYTES, KEY_NBYTES);
    copy(lane, stage, STEPS, call.key_scales + block * STEP_NBYTES, STEP_NBYTES);
    copy(lane, stage, REF, (const u8*)call.key_refs + block * REF_NBYTES, REF_NBYTES);
    copy(lane, stage, SCALES, (const u8*)call.page_scales + block / 2 * SCALE_NBYTES, SCALE_NBYTES);
#if RANK
    copy(lane, stage, LEFT, call.key_residuals + block * LEFT_NBYTES, LEFT_NBYTES);
#endif
    copy(lane, stage, VALUES, call.value_codes + block * VALUE_NBYTES, VALUE_NBYTES);
}
