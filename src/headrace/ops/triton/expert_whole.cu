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
};

struct Share {
    int begin, end;
};

__device__ __forceinline__ Share share_of(int total) {
    return {(int)((u64)total * blockIdx.x / gridDim.x), (int)((u64)total * (blockIdx.x + 1) / gridDim.x)};
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

__device__ __forceinline__ float bias_of(const u8* slot, int at, int row) {
#if HAS_BIAS
    return ((const float*)(slot + at))[row];
#else
    return 0.0f;
#endif
}

// The fetching warp: one lane.
__device__ __forceinline__ void fetch(const Call& call, Shared& sh, Share one, Share two) {
    for (int i = 0; i < one.end - one.begin; i++) {
        int stage = i % STAGES, tile = (one.begin + i) % TILES1;
        const u8* slot = slot_of(call, call.entries[(one.begin + i) / TILES1]);
        if (i >= STAGES) barrier_wait(sh.gate_up_free[stage], (i / STAGES - 1) & 1);
        u64& full = sh.gate_up_full[stage];
        barrier_expect(full, CODES1 + SCALES1);
        bulk_copy(sh.gate_up[stage], slot + GATE_UP_CODES + tile * CODES1, CODES1, full);
        bulk_copy(sh.gate_up[stage] + CODES1, slot + GATE_UP_SCALES + tile * SCALES1, SCALES1, full);
    }
    int k = 0;
    for (int at = two.begin; at < two.end; k++) {
        Run run = run_of(at, two.end);
        int stage = k % CHUNKS;
        const u8* slot = slot_of(call, call.entries[run.entry]);
        if (k >= CHUNKS) barrier_wait(sh.down_free[stage], (k / CHUNKS - 1) & 1);
        u64& full = sh.down_full[stage];
        barrier_expect(full, run.count * (CODES2 + SCALES2));
        bulk_copy(sh.down[stage], slot + DOWN_CODES + run.tile * CODES2, run.count * CODES2, full);
        bulk_copy(sh.down[stage] + CHUNK * CODES2, slot + DOWN_SCALES + run.tile * SCALES2, run.count * SCALES2, full);
        at += run.count;
    }
}

__device__ __forceinline__ void count_done(const Call& call, int entry, int tiles) {
    __threadfence();
    atomicAdd(call.done + entry, tiles);
}

// The closing warp.
__device__ __forceinline__ void close(const Call& call, Shared& sh, Share one, int count) {
    int lane = threadIdx.x % 32, step = 0, current = -1, mine = 0;
    int4 entry = make_int4(0, 0, 0, 0);
    for (int at = one.begin; at < one.end; at++) {
        int tile = at % TILES1;
        if (at / TILES1 != current) {
            if (mine && lane == 0) count_done(call, current, mine);
            current = at / TILES1;
            entry = call.entries[current];
            mine = 0;
        }
        // Lanes 0 to 7 have gates, 8 to 15 ups.
        float bias = lane < 16 ? bias_of(slot_of(call, entry), GATE_UP_BIAS, tile * 16 + lane % 8 * 2 + lane / 8) : 0.0f;
        for (int pair = entry.z; pair < entry.z + entry.w; pair++, step++) {
            int place = step % RESULTS;
            barrier_wait(sh.sums_full[place], step / RESULTS & 1);
            float y = 0.0f;
            for (int w = 0; w < WARPS; w++) y += sh.sums[place][w][lane % 16];
            __syncwarp();
            if (lane == 0) barrier_arrive(sh.sums_free[place]);
            y = y * RESULT + bias;
            float up = __shfl_xor_sync(~0u, y, 8);
            if (lane < 8) store_halves(h_of(call, entry, pair) + tile * 8, S * WIDTH, lane, gated(y, up));
            __syncwarp();
        }
        mine++;
    }
    if (mine && lane == 0) count_done(call, current, mine);
    barrier_wait(sh.polled, 0);
    if (lane == 0 && atomicAdd(call.passed, 1) == (int)gridDim.x - 1) {  // nobody reads them any more
        for (int i = 0; i < count; i++) call.done[i] = 0;
        *call.passed = 0;
    }
}

// This warp's columns of the block's tiles of gate and up.
__device__ __forceinline__ void multiply_gate_up(const Call& call, Shared& sh, Share one) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = 0, current = -1, held = -1;
    int4 entry = make_int4(0, 0, 0, 0);
    u32 b[UNITS1][16];
    for (int i = 0; i < one.end - one.begin; i++) {
        int stage = i % STAGES;
        if ((one.begin + i) / TILES1 != current) {
            current = (one.begin + i) / TILES1;
            entry = call.entries[current];
        }
        for (int pair = entry.z; pair < entry.z + entry.w; pair++, step++) {
            int token = call.pair_token[pair], place = step % RESULTS;
            if (token != held) {
                load_halves<UNITS1, BLOCKS1>(b, call.x + (u64)token * (2 * HIDDEN), HIDDEN, warp * UNITS1);
                held = token;
            }
            barrier_wait(sh.gate_up_full[stage], i / STAGES & 1);
            const u8* codes = sh.gate_up[stage];
            float2 y = two_rows<UNITS1, ROW1, BLOCKS1>(codes, codes + CODES1, b, warp * UNITS1);
            if (step >= RESULTS) barrier_wait(sh.sums_free[place], (step / RESULTS - 1) & 1);
            if (lane % 4 == 0) {
                sh.sums[place][warp][lane / 4] = y.x;
                sh.sums[place][warp][8 + lane / 4] = y.y;
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(sh.sums_full[place]);
        }
        if (lane == 0) barrier_arrive(sh.gate_up_free[stage]);
    }
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
                u32 b[UNITS1][16];
                load_halves<UNITS1, BLOCKS1>(b, x, HIDDEN, w * UNITS1);
                float2 y = two_rows<UNITS1, ROW1, BLOCKS1>(codes, scales, b, w * UNITS1);
                gate += y.x;
                up += y.y;
            }
            gate = gate * RESULT + bias_of(slot, GATE_UP_BIAS, tile * 16 + 2 * g);
            up = up * RESULT + bias_of(slot, GATE_UP_BIAS, tile * 16 + 2 * g + 1);
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

// Whole rows of the block's tiles of down; warps take tiles in turn.
__device__ __forceinline__ void multiply_down(const Call& call, Shared& sh, Share two) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, current = -1, held = -1, k = 0;
    int last = two.end > two.begin ? (two.end - 1) / TILES2 : -1;
    int4 entry = make_int4(0, 0, 0, 0);
    u32 b[UNITS2][16];
    if (last < 0 && lane == 0) barrier_arrive(sh.polled);
    for (int at = two.begin; at < two.end; k++) {
        Run run = run_of(at, two.end);
        int stage = k % CHUNKS, first = (at - two.begin) % WARPS;
        if (run.entry != current) {
            current = run.entry;
            entry = call.entries[current];
            held = -1;
            await_tiles(call, current, entry);
            if (current == last && lane == 0) barrier_arrive(sh.polled);
        }
        barrier_wait(sh.down_full[stage], k / CHUNKS & 1);
        const u8* slot = slot_of(call, entry);
        for (int i = (warp + WARPS - first) % WARPS; i < run.count; i += WARPS) {
            int row = (run.tile + i) * 16 + lane / 4 * 2;
            float2 bias = make_float2(bias_of(slot, DOWN_BIAS, row), bias_of(slot, DOWN_BIAS, row + 1));
            for (int pair = entry.z; pair < entry.z + entry.w; pair++) {
                if (pair != held) {
                    load_halves<UNITS2, BLOCKS2>(b, h_of(call, entry, pair), S * WIDTH, 0);
                    held = pair;
                }
                float weight = call.pair_weight[pair];
                float2 y = two_rows<UNITS2, ROW2, BLOCKS2>(
                    sh.down[stage] + i * CODES2, sh.down[stage] + CHUNK * CODES2 + i * SCALES2, b, 0);
                float* out = call.partial + ((u64)pair * S + entry.y % S) * HIDDEN + row;
                y = make_float2((y.x * RESULT + bias.x) * weight, (y.y * RESULT + bias.y) * weight);
                if (lane % 4 == 0) *(float2*)out = y;
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(sh.down_free[stage]);
        at += run.count;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 64, 1) expert_whole(const __grid_constant__ Call call) {
    SHARED_MEMORY(raw);
    Shared& sh = *(Shared*)raw;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(sh.gate_up_full[i], 1);
            barrier_init(sh.gate_up_free[i], WARPS);
        }
        for (int i = 0; i < CHUNKS; i++) {
            barrier_init(sh.down_full[i], 1);
            barrier_init(sh.down_free[i], WARPS);
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
    start_next_kernel();
    int count = call.counts[call.which];
    Share one = share_of(count * TILES1), two = share_of(count * TILES2);
    if (warp == WARPS) {
        if (threadIdx.x % 32 == 0) fetch(call, sh, one, two);
    } else if (warp == WARPS + 1) {
        close(call, sh, one, count);
    } else {
        multiply_gate_up(call, sh, one);
        multiply_down(call, sh, two);
    }
}
