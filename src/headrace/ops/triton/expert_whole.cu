// A layer's resident MXFP4 experts in one kernel: gate, up, activation and down of a list of slices.
//
// Two kernels cost some 4 us each beyond their bytes: they start, fill, and drain one after the other. Here
// bytes never stop. One block to a multiprocessor; a piece of work is a tile of 16 rows of gate and up, or CHUNK
// tiles of down. Multiprocessors do not get equal shares of the memory's rate (with equal shares of tiles the
// last ended gate and up 5 us after the first), so blocks draw pieces, in the order of the entries. When the
// tiles of gate and up are used up, the first entries' h have long been there, and nobody waits for the last.
// - The fetching warp draws pieces, says which in ``work``, and brings them by bulk copies.
// - WARPS warps each multiply their columns of every tile of gate and up, with the activation in registers
//   (expert_halves.py says how products are made), and leave sums.
// - The closing warp adds them up in a fixed order, applies the activation, stores h, and counts tiles of each
//   entry that are done.
// - The bringing warp waits until all tiles of an entry are counted, and copies its h to the pieces of down.
// - The multiplying warps then take whole rows of down, tiles in turn.
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
    int* drawn;      // pieces of gate and up, and of down, that blocks drew; zero before and after
    int* passed;     // blocks that need the others' counts no more; zero before and after
    int which;       // of counts
    int most;        // entries that there can be
};

// The tiles of gate and up that a block takes without drawing: a run, so that it changes entries seldom.
__device__ __forceinline__ int own_tiles(int total) { return total * OWN_PERCENT / 100 / (int)gridDim.x; }

// Up to CHUNK tiles of down of one entry.
struct Run {
    int entry, tile, count;
};

__device__ __forceinline__ Run run_of(int work) {
    int tile = work % CHUNKS * CHUNK;
    return {work / CHUNKS, tile, min(CHUNK, TILES2 - tile)};
}

__device__ __forceinline__ int4 entry_of(const Call& call, const Shared& sh, int index) {
    return index < ENTRIES ? sh.entries[index] : call.entries[index];
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

// The fetching warp.
__device__ __forceinline__ void fetch(const Call& call, Shared& sh) {
    int lane = threadIdx.x % 32;
    if (lane < ENTRIES && lane < call.most) sh.entries[lane] = call.entries[lane];
    int count = call.counts[call.which];
    __syncwarp();
    if (lane) return;
    u64 policy = read_once();
    int i = 0, current = -1;
    const u8* slot = call.arena;
    auto claim = [&](int work, int entry) {
        int stage = i % STAGES;
        if (entry != current) {
            current = entry;
            slot = slot_of(call, entry_of(call, sh, entry));
        }
        if (i >= STAGES) barrier_wait(sh.free[stage], (i / STAGES - 1) & 1);
        sh.work[stage] = work;
        barrier_arrive(sh.known[stage]);
    };
    auto bring = [&](int to, int from, u32 nbytes) {
        bulk_copy(sh.stage[i % STAGES] + to, slot + from, nbytes, sh.full[i % STAGES], policy);
    };
    auto end = [&]() {
        claim(END, current);
        barrier_arrive(sh.full[i % STAGES]);
        i++;
    };
    // A draw takes most of a microsecond: each is asked for a piece ahead, and the first not at the start.
    int total = count * TILES1, own = own_tiles(total), drawn = own ? 0 : atomicAdd(call.drawn, 1);
    for (int k = 0;; k++, i++) {
        int work = k < own ? (int)blockIdx.x * own + k : own * (int)gridDim.x + drawn;
        if (k + 1 >= own) drawn = atomicAdd(call.drawn, 1);
        if (work >= total) break;
        int tile = work % TILES1;
        claim(work, work / TILES1);
        barrier_expect(sh.full[i % STAGES], NBYTES1);
        bring(0, GATE_UP_CODES + tile * CODES1, CODES1);
        bring(CODES1, GATE_UP_SCALES + tile * SCALES1, SCALES1);
        if (HAS_BIAS) bring(CODES1 + SCALES1, GATE_UP_BIAS + tile * BIAS, BIAS);
    }
    end();
    for (drawn = atomicAdd(call.drawn + 1, 1);; i++) {
        int work = drawn;
        drawn = atomicAdd(call.drawn + 1, 1);
        if (work >= count * CHUNKS) break;
        Run run = run_of(work);
        claim(work, run.entry);
        barrier_expect(sh.full[i % STAGES], run.count * (CODES2 + SCALES2 + BIAS));
        bring(0, DOWN_CODES + run.tile * CODES2, run.count * CODES2);
        bring(CHUNK * CODES2, DOWN_SCALES + run.tile * SCALES2, run.count * SCALES2);
        if (HAS_BIAS) bring(CHUNK * (CODES2 + SCALES2), DOWN_BIAS + run.tile * BIAS, run.count * BIAS);
    }
    end();
}

// Add the warps' sums of a tile, and store h of a pair.
__device__ __forceinline__ void close_tile(const Call& call, Shared& sh, int place, int4 entry, int pair, int tile) {
    int lane = threadIdx.x % 32;
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

// The closing warp.
__device__ __forceinline__ void close(const Call& call, Shared& sh) {
    int lane = threadIdx.x % 32, step = 0, current = -1, mine = 0;
    int4 entry = make_int4(0, 0, 0, 0);
    for (;;) {
        barrier_wait(sh.sums_full[step % RESULTS], step / RESULTS & 1);
        int work = sh.sums_of[step % RESULTS];
        if (work == END || work / TILES1 != current) {
            if (mine && lane == 0) add_released(call.done + current, mine);
            if (work == END) break;
            current = work / TILES1;
            entry = entry_of(call, sh, current);
            mine = 0;
        }
        for (int pair = entry.z; pair < entry.z + entry.w; pair++, step++) {
            barrier_wait(sh.sums_full[step % RESULTS], step / RESULTS & 1);
            close_tile(call, sh, step % RESULTS, entry, pair, work % TILES1);
        }
        mine++;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sh.closed);
}

// This warp's columns of the block's tiles of gate and up; how many stages they took.
__device__ __forceinline__ int multiply_gate_up(const Call& call, Shared& sh) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = 0, current = -1, held = -1, token = 0;
    int4 entry = make_int4(0, 0, 0, 0);
    u32 b[UNITS1][16];
    for (int i = 0;; i++) {
        int stage = i % STAGES;
        barrier_wait(sh.known[stage], i / STAGES & 1);
        int work = sh.work[stage];
        if (work == END) {
            if (step >= RESULTS) barrier_wait(sh.sums_free[step % RESULTS], (step / RESULTS - 1) & 1);
            if (lane == 0) {
                sh.sums_of[step % RESULTS] = END;
                barrier_arrive(sh.sums_full[step % RESULTS]);
                barrier_arrive(sh.free[stage]);
            }
            start_next_kernel();
            return i + 1;
        }
        const u8 *codes = sh.stage[stage], *scales = codes + CODES1;
        if (work / TILES1 != current) {
            current = work / TILES1;
            entry = entry_of(call, sh, current);
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
            if (warp == WARPS - 1) {  // which has the fewest columns
                if (lane < 16) sh.biases[place][lane] = bias_of(scales + SCALES1, lane % 8 * 2 + lane / 8);
                if (lane == 0) sh.sums_of[place] = work;
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(sh.sums_full[place]);
        }
        if (lane == 0) barrier_arrive(sh.free[stage]);
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

// The warp that brings each run's h, as soon as it is there.
__device__ __forceinline__ void bring_h(const Call& call, Shared& sh) {
    int lane = threadIdx.x % 32, current = -1, ends = 0;
    int4 entry = make_int4(0, 0, 0, 0);
    for (int i = 0;; i++) {
        int stage = i % STAGES;
        barrier_wait(sh.known[stage], i / STAGES & 1);
        int work = sh.work[stage];
        __syncwarp();
        if (lane == 0) barrier_arrive(sh.free[stage]);
        if (work == END && ++ends == 2) break;
        if (work == END || ends == 0) continue;
        Run run = run_of(work);
        if (run.entry != current) {
            current = run.entry;
            entry = entry_of(call, sh, current);
            await_tiles(call, current, entry);
            copies_see_memory();
        }
        if (lane == 0) {
            const u16* h = h_of(call, entry, entry.z);
            barrier_expect(sh.h_full[stage], 2 * H_NBYTES);
            bulk_copy(sh.h[stage][0], h, H_NBYTES, sh.h_full[stage]);
            bulk_copy(sh.h[stage][1], h + S * WIDTH, H_NBYTES, sh.h_full[stage]);
        }
        __syncwarp();
    }
    barrier_wait(sh.closed, 0);
    if (lane == 0 && atomicAdd(call.passed, 1) == (int)gridDim.x - 1) {  // nobody reads them any more
        int count = call.counts[call.which];
        for (int k = 0; k < count; k++) call.done[k] = 0;
        call.drawn[0] = call.drawn[1] = 0;
        *call.passed = 0;
    }
}

// Whole rows of the block's tiles of down; warps take tiles in turn. ``i``: stages used so far.
__device__ __forceinline__ void multiply_down(const Call& call, Shared& sh, int i) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = 0, begin = i;
    for (;; i++) {
        int stage = i % STAGES;
        barrier_wait(sh.known[stage], i / STAGES & 1);
        int work = sh.work[stage];
        if (work == END) return;
        Run run = run_of(work);
        int4 entry = entry_of(call, sh, run.entry);
        barrier_wait(sh.h_full[stage], (i - begin) / STAGES & 1);
        barrier_wait(sh.full[stage], i / STAGES & 1);
        const u8 *codes = sh.stage[stage], *scales = codes + CHUNK * CODES2, *biases = scales + CHUNK * SCALES2;
        for (int k = (warp + WARPS - first) % WARPS; k < run.count; k += WARPS) {
            int row = lane / 4 * 2;
            for (int pair = entry.z; pair < entry.z + entry.w; pair++) {
                float weight = call.pair_weight[pair];
                float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int u = 0; u < UNITS2; u++) {
                    u32 b[16];
                    if (entry.w == 1) load_halves<BLOCKS2>(b, sh.h[stage][0], WIDTH, u * 4);
                    else load_halves<BLOCKS2>(b, h_of(call, entry, pair), S * WIDTH, u * 4);
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
        first = (first + run.count) % WARPS;
    }
}

// Lines that blocks soon wait for one after the other, all at once: in a step, the kernel before wrote them, but
// a stream of weights may have driven them from the cache.
__device__ __forceinline__ void ask_ahead(const Call& call) {
    int i = threadIdx.x;
    if (i == 32) ask(call.pair_token);
    if (i == 33) ask(call.pair_weight);
    for (int k = i * 64; k < 2 * HIDDEN; k += (32 * WARPS + 96) * 64) ask(call.x + k);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) expert_whole(const __grid_constant__ Call call) {
    SHARED_MEMORY(raw);
    Shared& sh = *(Shared*)raw;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(sh.known[i], 1);
            barrier_init(sh.full[i], 1);
            barrier_init(sh.h_full[i], 1);
            barrier_init(sh.free[i], WARPS + 1);
        }
        for (int i = 0; i < RESULTS; i++) {
            barrier_init(sh.sums_full[i], WARPS);
            barrier_init(sh.sums_free[i], 1);
        }
        barrier_init(sh.closed, 1);
        barriers_are_set_up();
    }
    __syncthreads();
    wait_for_kernel();
    ask_ahead(call);
    if (warp == WARPS) {
        fetch(call, sh);
    } else if (warp == WARPS + 1) {
        close(call, sh);
    } else if (warp == WARPS + 2) {
        bring_h(call, sh);
    } else {
        int stages = multiply_gate_up(call, sh);
        multiply_down(call, sh, stages);
    }
}
