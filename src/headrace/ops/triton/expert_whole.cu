// A layer's resident MXFP4 experts in one kernel: gate, up, activation and down of a list of slices.
//
// Two kernels cost some 4 us each beyond their bytes: they start, fill, and drain one after the other. Here
// bytes never stop. Blocks have equal shares of both matrices' tiles of 16 rows, one block to a multiprocessor.
// - The fetching warp brings tiles of gate and up by bulk copies, then those of down, which need not wait for
//   the others: they travel while activations are exchanged.
// - WARPS warps each multiply their columns of every tile of gate and up, with the activation in registers
//   (expert_halves.py says how products are made), and leave sums.
// - The closing warp adds them up in a fixed order, applies the activation, stores h, and counts tiles of each
//   slice that are done.
// - Then those warps wait until all tiles of a slice are counted, and multiply whole rows of down.
// No float is added by an atomic, and sums have an order of their own whatever block or slot has the rows, so
// the same experts give the same bits wherever they lie.
//
// Waiting for other blocks is safe whatever else holds the GPU. If all blocks are resident, each one's tiles
// get done. Kernels that wait for this one in turn (programmatic dependents) are started only when all of its
// blocks are. If something else keeps a block from starting, those that wait for its tiles compute them
// themselves after PATIENCE_NS: slow, but the same values, and nothing that runs depends on what does not.

struct Call {
    const u8* arena;
    const int4* entries;  // slot, slice of all experts', first pair, pairs
    const int* counts;
    const int* pair_token;
    const float* pair_weight;
    const u16* x;    // halves [tokens, 2, HIDDEN]
    u16* h;          // halves [pairs, 2, S * WIDTH]
    float* partial;  // [pairs, S, HIDDEN]
    int* done;       // of each entry, tiles of gate and up that are done; zero before and after
    int* passed;     // blocks that need ``done`` no more; zero before and after
    int which;       // of counts
    int most;        // entries that there can be
};

struct Share {
    int begin, end;
};

__device__ __forceinline__ Share share_of(u32 total) {
    return {(int)(total * blockIdx.x / gridDim.x), (int)(total * (blockIdx.x + 1) / gridDim.x)};
}

// A run of up to CHUNK tiles of down of one entry, from tile ``at`` of all on.
struct Run {
    int entry, tile, count;
};

__device__ __forceinline__ Run run_of(int at, int end) {
    int tile = at % TILES2;
    return {at / TILES2, tile, min(min(CHUNK, TILES2 - tile), end - at)};
}

__device__ __forceinline__ const u8* slot_of(const Call& call, int4 entry) {
    return call.arena + (u64)entry.x * SLICE_NBYTES;
}

__device__ __forceinline__ u16* h_of(const Call& call, int4 entry, int pair) {
    return call.h + (u64)pair * (2 * S * WIDTH) + entry.y % S * WIDTH;
}

__device__ __forceinline__ float bias_of(const u8* biases, int row) {
    return HAS_BIAS ? ((const float*)biases)[row] : 0.0f;
}

// The fetching warp: one lane.
__device__ __forceinline__ void fetch(const Call& call, Shared& sh, Share one, Share two) {
    u64 policy = read_once();
    int i = 0, current = -1;
    const u8* slot = call.arena;
    auto claim = [&](int entry, u32 nbytes) {
        if (entry != current) {
            current = entry;
            slot = slot_of(call, call.entries[entry]);
        }
        if (i >= STAGES) barrier_wait(sh.free[i % STAGES], (i / STAGES - 1) & 1);
        barrier_expect(sh.full[i % STAGES], nbytes);
    };
    auto bring = [&](int to, int from, u32 nbytes) {
        bulk_copy(sh.stage[i % STAGES] + to, slot + from, nbytes, sh.full[i % STAGES], policy);
    };
    for (int at = one.begin; at < one.end; at++, i++) {
        int tile = at % TILES1;
        claim(at / TILES1, NBYTES1);
        bring(0, GATE_UP_CODES + tile * CODES1, CODES1);
        bring(CODES1, GATE_UP_SCALES + tile * SCALES1, SCALES1);
        if (HAS_BIAS) bring(CODES1 + SCALES1, GATE_UP_BIAS + tile * BIAS, BIAS);
    }
    for (int at = two.begin; at < two.end; i++) {
        Run run = run_of(at, two.end);
        claim(run.entry, run.count * (CODES2 + SCALES2 + BIAS));
        bring(0, DOWN_CODES + run.tile * CODES2, run.count * CODES2);
        bring(CHUNK * CODES2, DOWN_SCALES + run.tile * SCALES2, run.count * SCALES2);
        if (HAS_BIAS) bring(CHUNK * (CODES2 + SCALES2), DOWN_BIAS + run.tile * BIAS, run.count * BIAS);
        at += run.count;
    }
}

// The closing warp.
__device__ __forceinline__ void close(const Call& call, Shared& sh, Share one, int count) {
    int lane = threadIdx.x % 32, step = 0, current = -1, mine = 0;
    int4 entry = make_int4(0, 0, 0, 0);
    for (int at = one.begin; at < one.end; at++) {
        int tile = at % TILES1;
        if (at / TILES1 != current) {
            if (mine && lane == 0) add_released(call.done + current, mine);
            current = at / TILES1;
            entry = call.entries[current];
            mine = 0;
        }
        for (int pair = entry.z; pair < entry.z + entry.w; pair++, step++) {
            int place = step % RESULTS;
            barrier_wait(sh.sums_full[place], step / RESULTS & 1);
            float y = 0.0f, bias = sh.biases[place][lane % 16];
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float4 four = sh.sums[place][w][lane % 16];
                y += (four.x + four.y) + (four.z + four.w);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(sh.sums_free[place]);
            y = y * RESULT + bias;  // gates in lanes 0 to 7, ups in 8 to 15
            float up = __shfl_xor_sync(~0u, y, 8);
            if (lane < 8) store_halves(h_of(call, entry, pair) + tile * 8, S * WIDTH, lane, gated(y, up));
            __syncwarp();
        }
        mine++;
    }
    if (mine && lane == 0) add_released(call.done + current, mine);
    barrier_wait(sh.polled, 0);
    if (lane == 0 && atomicAdd(call.passed, 1) == (int)gridDim.x - 1) {  // nobody reads them any more
        for (int i = 0; i < count; i++) call.done[i] = 0;
        *call.passed = 0;
    }
}

// This warp's columns of the block's tiles of gate and up.
__device__ __forceinline__ void multiply_gate_up(const Call& call, Shared& sh, Share one) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = 0, current = -1, held = -1, token = 0;
    int4 entry = make_int4(0, 0, 0, 0);
    u32 b[UNITS1][16];
    for (int i = 0; i < one.end - one.begin; i++) {
        int stage = i % STAGES;
        const u8 *codes = sh.stage[stage], *scales = codes + CODES1;
        if ((one.begin + i) / TILES1 != current) {
            current = (one.begin + i) / TILES1;
            entry = call.entries[current];
            token = call.pair_token[entry.z];
        }
        for (int pair = entry.z; pair < entry.z + entry.w; pair++, step++) {
            int place = step % RESULTS;
            if (entry.w > 1) token = call.pair_token[pair];
            const u16* x = call.x + (u64)token * (2 * HIDDEN);
            if (token != held) {
#pragma unroll
                for (int u = 0; u < UNITS1; u++) load_halves<BLOCKS1>(b[u], x, HIDDEN, (warp * UNITS1 + u) * 4);
                held = token;
            }
            barrier_wait(sh.full[stage], i / STAGES & 1);
            float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int u = 0; u < UNITS1; u++)
                add_unit<ROW1, BLOCKS1>(y, codes, scales, b[u], (warp * UNITS1 + u) * 4);
            if (step >= RESULTS) barrier_wait(sh.sums_free[place], (step / RESULTS - 1) & 1);
            float* sums = (float*)sh.sums[place][warp];
            sums[lane] = y.x;
            sums[32 + lane] = y.y;
            if (warp == WARPS - 1 && lane < 16)  // which has the fewest columns
                sh.biases[place][lane] = bias_of(scales + SCALES1, lane % 8 * 2 + lane / 8);
            __syncwarp();
            if (lane == 0) barrier_arrive(sh.sums_full[place]);
        }
        if (lane == 0) barrier_arrive(sh.free[stage]);
    }
    start_next_kernel();
}

// All of an entry's h, by this warp, in the same order of sums as everywhere.
__device__ __noinline__ void stand_in(const Call& call, int4 entry) {
    int lane = threadIdx.x % 32, g = lane / 4;
    const u8* slot = slot_of(call, entry);
    for (int tile = 0; tile < TILES1; tile++) {
        const u8* codes = slot + GATE_UP_CODES + tile * CODES1;
        const u8* scales = slot + GATE_UP_SCALES + tile * SCALES1;
        for (int pair = entry.z; pair < entry.z + entry.w; pair++) {
            const u16* x = call.x + (u64)call.pair_token[pair] * (2 * HIDDEN);
            float gate = 0.0f, up = 0.0f;
            for (int w = 0; w < WARPS; w++) {
                float2 y = make_float2(0.0f, 0.0f);
                for (int u = w * UNITS1; u < (w + 1) * UNITS1; u++) {
                    u32 b[16];
                    load_halves<BLOCKS1>(b, x, HIDDEN, u * 4);
                    add_unit<ROW1, BLOCKS1>(y, codes, scales, b, u * 4);
                }
                y = over_four_lanes(y);
                gate += y.x;
                up += y.y;
            }
            gate = gate * RESULT + bias_of(slot + GATE_UP_BIAS, tile * 16 + 2 * g);
            up = up * RESULT + bias_of(slot + GATE_UP_BIAS, tile * 16 + 2 * g + 1);
            if (lane % 4 == 0) store_halves(h_of(call, entry, pair) + tile * 8, S * WIDTH, g, gated(gate, up));
        }
    }
    __threadfence();
    __syncwarp();
}

__device__ __forceinline__ void await_tiles(const Call& call, int index, int4 entry) {
    if (acquired(call.done + index) < TILES1) {
        u64 start = clock_ns();
        bool late = false;
        while (!late && acquired(call.done + index) < TILES1) late = clock_ns() - start > PATIENCE_NS;
        if (__any_sync(~0u, late)) stand_in(call, entry);
    }
    __syncwarp();
}

// Whole rows of the block's tiles of down; warps take tiles in turn. ``i``: stages used so far.
__device__ __forceinline__ void multiply_down(const Call& call, Shared& sh, Share two, int i) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, current = -1;
    int last = two.end > two.begin ? (two.end - 1) / TILES2 : -1;
    int4 entry = make_int4(0, 0, 0, 0);
    if (last < 0 && lane == 0) barrier_arrive(sh.polled);
    for (int at = two.begin; at < two.end; i++) {
        Run run = run_of(at, two.end);
        int stage = i % STAGES, first = (at - two.begin) % WARPS;
        if (run.entry != current) {
            current = run.entry;
            entry = call.entries[current];
            await_tiles(call, current, entry);
            if (current == last && lane == 0) barrier_arrive(sh.polled);
            const u16* h = h_of(call, entry, entry.z);  // into the first-level cache, at once
            for (int k = lane * 64; k < WIDTH; k += 32 * 64) {
                touch(h + k);
                touch(h + S * WIDTH + k);
            }
        }
        barrier_wait(sh.full[stage], i / STAGES & 1);
        const u8 *codes = sh.stage[stage], *scales = codes + CHUNK * CODES2, *biases = scales + CHUNK * SCALES2;
        for (int k = (warp + WARPS - first) % WARPS; k < run.count; k += WARPS) {
            int row = lane / 4 * 2;
            for (int pair = entry.z; pair < entry.z + entry.w; pair++) {
                float weight = call.pair_weight[pair];
                const u16* h = h_of(call, entry, pair);
                float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int u = 0; u < UNITS2; u++) {
                    u32 b[16];
                    load_halves<BLOCKS2>(b, h, S * WIDTH, u * 4);
                    add_unit<ROW2, BLOCKS2>(y, codes + k * CODES2, scales + k * SCALES2, b, u * 4);
                }
                y = over_four_lanes(y);
                y.x = (y.x * RESULT + bias_of(biases, k * 16 + row)) * weight;
                y.y = (y.y * RESULT + bias_of(biases, k * 16 + row + 1)) * weight;
                float* out = call.partial + ((u64)pair * S + entry.y % S) * HIDDEN + (run.tile + k) * 16 + row;
                if (lane % 4 == 0) *(float2*)out = y;
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(sh.free[stage]);
        at += run.count;
    }
}

// Lines that blocks soon wait for one after the other, all at once: in a step, the kernel before wrote them, but
// a stream of weights may have driven them from the cache.
__device__ __forceinline__ void ask_ahead(const Call& call) {
    int i = threadIdx.x;
    if (i < 32 && 8 * i < call.most) ask(call.entries + 8 * i);
    if (i == 32) ask(call.pair_token);
    if (i == 33) ask(call.pair_weight);
    for (int k = i * 64; k < 2 * HIDDEN; k += (32 * WARPS + 64) * 64) ask(call.x + k);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) expert_whole(const __grid_constant__ Call call) {
    SHARED_MEMORY(raw);
    Shared& sh = *(Shared*)raw;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(sh.full[i], 1);
            barrier_init(sh.free[i], WARPS);
        }
        for (int i = 0; i < RESULTS; i++) {
            barrier_init(sh.sums_full[i], WARPS);
            barrier_init(sh.sums_free[i], 1);
        }
        barrier_init(sh.polled, WARPS);
        barriers_are_set_up();
    }
    __syncthreads();
    wait_for_kernel();
    ask_ahead(call);
    int count = call.counts[call.which];
    Share one = share_of(count * TILES1), two = share_of(count * TILES2);
    if (warp == WARPS) {
        if (threadIdx.x % 32 == 0) fetch(call, sh, one, two);
    } else if (warp == WARPS + 1) {
        close(call, sh, one, count);
    } else {
        multiply_gate_up(call, sh, one);
        multiply_down(call, sh, two, one.end - one.begin);
    }
}
