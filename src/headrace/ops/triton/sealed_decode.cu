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

// The program is sealed_hopper.cuh, sealed_rest.cuh, this file and sealed_merge.cuh, one after the other.

// r . q of a page for the lane's two heads.
__device__ __forceinline__ float2 reference_scores(const u8* ref, const u32 (&query)[8][2]) {
    int c = threadIdx.x % 4;
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {  // 8 channels from 16 c + 64 (i / 2) + 8 (i % 2) on
        uint4 eight = read16(ref + 32 * c + 128 * (i / 2) + 16 * (i % 2));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float2 x = bfloats(j ? eight.z : eight.x), y = bfloats(j ? eight.w : eight.y);
            u32 one = half2_of(x.x, x.y), two = half2_of(y.x, y.y);
            const u32(&q)[2] = query[2 * (2 * (i % 2) + j) + i / 2];
            product(sum[i / 2], one, one, two, two, q[0], q[1]);  // all rows are the same
        }
    }
    return make_float2(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 32, BLOCKS) sealed_decode(const Call call) {
    SHARED_MEMORY(memory);
    Shared& s = *(Shared*)memory;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    int head = blockIdx.y, row = blockIdx.z;
    const int threads = 32 * WARPS + 32;
    // Merging may be started, and after it the next kernel, when the first blocks here end: both wait themselves.
    start_next_kernel();
    // What other kernels do not write comes before waiting for them.
#if RANK
    const int sums = (GROUP * RANK + WARPS) / (WARPS + 1);  // of a warp: U q by head and direction
    float4 along[sums];
#pragma unroll
    for (int i = 0; i < sums; i++) {
        int r = (warp + i * (WARPS + 1)) % RANK;
        along[i] = *(const float4*)(call.directions + ((u64)head * RANK + r) * DIM + 4 * lane);
    }
#endif
    int context = call.context_lens[row];
    int begin = max(context - call.window, 0);
    int own = (context - 1) / PAGE, first = begin / PAGE;
    const int* table = call.tables + (u64)row * call.stride_table;

    int pages = own - first;  // sealed ones
    int size = part_size(pages, call.cut), parts = (pages + size - 1) / size;
    int step = gridDim.x * WARPS;
    auto start_of = [&](int part) {
        int page = first + part * size;
        return Where{part, page, part < parts ? min(page + size, own) : page};
    };
    auto advance = [&](Where at) { return at.page + 1 < at.end ? Where{at.part, at.page + 1, at.end} : start_of(at.part + step); };
    auto block_at = [&](Where at) -> long long { return at.part < parts ? (long long)table[at.page] * call.kv_heads + head : -1; };
    Lane& mine = s.lane[warp % WARPS];
    Where now = start_of(warp < WARPS ? warp * gridDim.x + blockIdx.x : parts), ahead = now;
    u32 odd = 0;  // by stage: which of two pages' scales
    long long next = -1;
    if (warp < WARPS) {
        set_up(mine);
        long long blocks[STAGES];
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            blocks[stage] = block_at(ahead);
            ahead = ahead.part < parts ? advance(ahead) : ahead;
        }
        next = block_at(ahead);
        __syncwarp();
        // Memory may bring pages to the second-level cache while the kernel ahead ends.
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++)
            if (blocks[stage] >= 0 && lane == 0) fetch(call, blocks[stage]);
        wait_for_kernel();
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            if (blocks[stage] >= 0 && lane == 0) fill(call, mine, stage, blocks[stage]);
            odd |= (u32)(blocks[stage] & 1) << stage;
        }
    }
    wait_for_kernel();

    const float* q = call.q + ((u64)row * call.kv_heads + head) * GROUP * DIM;
    float mine_of_q[(GROUP * DIM + threads - 1) / threads];
#pragma unroll
    for (int i = 0; i * threads < GROUP * DIM; i++) {
        int at = threadIdx.x + i * threads;
        mine_of_q[i] = at < GROUP * DIM ? q[at] * call.scale : 0.0f;
    }
#pragma unroll
    for (int i = 0; i * threads < GROUP * DIM; i++) {
        int at = threadIdx.x + i * threads;
        if (at < GROUP * DIM) s.query[at / DIM][at % DIM] = mine_of_q[i];
    }
    for (int i = GROUP * DIM + threadIdx.x; i < 8 * DIM; i += threads) s.query[i / DIM][i % DIM] = 0.0f;
    __syncthreads();
#if RANK
#pragma unroll
    for (int i = 0; i < sums; i++) {
        int at = warp + i * (WARPS + 1), h = at / RANK;
        if (h >= GROUP) continue;
        float4 of = *(const float4*)&s.query[h][4 * lane];
        float x = along[i].x * of.x + along[i].y * of.y + along[i].z * of.z + along[i].w * of.w;
        for (int j = 16; j; j /= 2) x += __shfl_xor_sync(~0u, x, j);
        if (lane == 0) s.turned[h][at % RANK] = x * 0.125f;
    }
    for (int i = GROUP * RANK + threadIdx.x; i < 8 * RANK; i += threads) s.turned[i / RANK][i % RANK] = 0.0f;
    __syncthreads();
#endif
    if (warp == WARPS) {
        if (blockIdx.x == 0) rest(call, s, row, head, context, begin, table);
        return;
    }
    if (now.part >= parts) return;

    u32 query[8][2], turned = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float* from = &s.query[g][16 * c + 4 * (i / 2) + 64 * (i % 2)];
        query[i][0] = half2_of(from[0], from[1]);
        query[i][1] = half2_of(from[2], from[3]);
    }
#if RANK
    if (c < 2) turned = half2_of(s.turned[g][2 * c], s.turned[g][2 * c + 1]);
#endif

    float top[2] = {NOTHING, NOTHING}, total[2] = {0.0f, 0.0f}, unit = 1.0f;
    float out[8][4];
#pragma unroll
    for (int m = 0; m < 8; m++)
        for (int i = 0; i < 4; i++) out[m][i] = 0.0f;
    int stage = 0;
    u32 parity = 0;
    int hidden = max(begin, FIRST);
    int first_token = 16 * (g / 2) + g % 2;  // of a lane: this, + 2, and both + 4, + 8, + 12

    while (true) {
        wait(mine, stage, parity);
        const u8* page = mine.page[stage];
        float2 shift = reference_scores(page + REF, query);
        float2 scale = *(const float2*)(page + SCALES + 8 * (odd >> stage & 1));

        // A product waits for the one whose sum it continues: two tiles at a time, low and high nibbles apart.
        float score[4][4];
#pragma unroll
        for (int pair = 0; pair < 4; pair += 2) {
            u32 steps[2][2][2];
            uint4 codes[2][2];
            float sum[2][2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int token = first_token + 4 * (pair + n);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    codes[n][i] = read16(page + (token + 2 * i) * (DIM / 2) + 16 * c);
                    u32 two = *(const u16*)(page + STEPS + (token + 2 * i) * (DIM / 16) + 2 * c);
                    two = mul2(e4m3x2(two), HALF_OF_BOTH);
                    steps[n][i][0] = __byte_perm(two, 0, 0x1010);
                    steps[n][i][1] = __byte_perm(two, 0, 0x3232);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) sum[n][0][i] = sum[n][1][i] = 0.0f;
            }
#pragma unroll
            for (int w = 0; w < 4; w++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    u32 a[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const uint4& four = codes[n][i];
                        unpack(a[i], w == 0 ? four.x : w == 1 ? four.y : w == 2 ? four.z : four.w, steps[n][i][w / 2]);
                    }
                    product(sum[n][0], a[0][0], a[1][0], a[0][1], a[1][1], query[2 * w][0], query[2 * w][1]);
                    product(sum[n][1], a[0][2], a[1][2], a[0][3], a[1][3], query[2 * w + 1][0], query[2 * w + 1][1]);
                }
#pragma unroll
            for (int n = 0; n < 2; n++) {
#if RANK
                const u8* left = page + LEFT + (first_token + 4 * (pair + n)) * RANK + 2 * (c & 1);
                product8(sum[n][0], e4m3x2(*(const u16*)left), e4m3x2(*(const u16*)(left + 2 * RANK)), turned);
#endif
#pragma unroll
                for (int i = 0; i < 4; i++) score[pair + n][i] = sum[n][0][i] + sum[n][1][i];
            }
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
                    if (first_token + 4 * tile + 2 * (i / 2) < unseen) score[tile][i] = MINUS_INFINITY;
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
        for (int four = 0; four < 8; four += 4) {  // 16 channels each, four chains of products at a time
            uint4 codes[4][2];
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    codes[m][i] = read16(page + VALUES + (16 * (four + m) + g + 8 * i) * PAGE + 16 * c);
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const uint4 &a = codes[m][0], &b = codes[m][1];
                    u32 x = tile == 0 ? a.x : tile == 1 ? a.y : tile == 2 ? a.z : a.w;
                    u32 y = tile == 0 ? b.x : tile == 1 ? b.y : tile == 2 ? b.z : b.w;
                    product(
                        out[four + m], e4m3x2(x), e4m3x2(y), e4m3x2_high(x), e4m3x2_high(y), weight[tile][0],
                        weight[tile][1]);
                }
        }
        __syncwarp();
        if (next >= 0 && lane == 0) fill(call, mine, stage, next);
        odd = (odd & ~(1u << stage)) | (u32)(next & 1) << stage;
        ahead = ahead.part < parts ? advance(ahead) : ahead;
        next = block_at(ahead);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;

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
        unit = 1.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = NOTHING, total[i] = 0.0f;
#pragma unroll
        for (int m = 0; m < 8; m++)
            for (int i = 0; i < 4; i++) out[m][i] = 0.0f;
    }
}
