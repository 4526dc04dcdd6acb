// Attention to what is in bfloat16. A part of the program of sealed_decode.cu.

// First keys and the row's own page: one warp, a token a lane, then four channels a lane. Slot 0.
struct Rest {
    float top[GROUP], total[GROUP], out[GROUP][4];

    // Up to 32 keys, rows of ``keys``, of which this lane's is ``t``; ``count``: how many values follow, the
    // first of them at ``values`` (bfloat16 rows), or in ``codes`` (E4M3, a page's columns) in units of ``unit``.
    __device__ void absorb(
        Shared& s, const u16* keys, int t, bool seen, const u16* values, const u8* codes, float unit, int count) {
        int lane = threadIdx.x % 32;
        uint4 key[DIM / 8], code[4];  // all of a lane's loads at once: their latency is what this costs
#pragma unroll
        for (int i = 0; i < DIM / 8; i++)
            key[i] = seen ? ((const uint4*)(keys + (u64)t * DIM))[i] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) code[i] = codes ? read16(codes + (4 * lane + i) * PAGE) : make_uint4(0, 0, 0, 0);
        float score[GROUP];
#pragma unroll
        for (int h = 0; h < GROUP; h++) score[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 8; i++) {
            u32 words[4] = {key[i].x, key[i].y, key[i].z, key[i].w};
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
        auto add = [&](int j, const float(&value)[4]) {
#pragma unroll
            for (int h = 0; h < GROUP; h++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[h][i] = fmaf(s.rest[j][h], value[i], out[h][i]);
        };
        if (codes) {
#pragma unroll
            for (int j = 0; j < FIRST; j++) {
                float value[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 word = j < 4 ? code[i].x : j < 8 ? code[i].y : j < 12 ? code[i].z : code[i].w;
                    value[i] = floats(e4m3x2(word >> 8 * (j % 4))).x * unit;
                }
                add(j, value);
            }
        } else {
#pragma unroll 8
            for (int j = 0; j < count; j++) {
                uint2 two = *(const uint2*)(values + (u64)j * DIM + 4 * lane);
                float2 a = bfloats(two.x), b = bfloats(two.y);
                float value[4] = {a.x, a.y, b.x, b.y};
                add(j, value);
            }
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
