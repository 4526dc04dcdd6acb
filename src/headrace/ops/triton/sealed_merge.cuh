// Merging. A part of the program of sealed_decode.cu.

// The parts of one row and head by their log-sum-exp, with the sink: GROUPS x 128 threads, a channel and every
// GROUPS-th part each, AT_ONCE of which are loaded together.
#define GROUPS 4
#define AT_ONCE 17  // GROUPS times as many cover the most parts that a row usually has, 65
extern "C" __global__ void __launch_bounds__(GROUPS * DIM) sealed_merge(
    const float2* sums, const float* mixed, const float* sinks, float* out, const int* context_lens, int window,
    Cut cut, int slots, int has_sinks) {
    __shared__ float share[GROUPS * DIM], pieces[GROUPS][DIM], warps[GROUPS * DIM / 32];
    int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, i = threadIdx.x;
    int context = context_lens[row];
    float sink = has_sinks ? sinks[head] * 1.4426950408889634f : MINUS_INFINITY;
    int pages = (context - 1) / PAGE - max(context - window, 0) / PAGE;
    int size = part_size(pages, cut), count = (pages + size - 1) / size + 1;
    u64 place = ((u64)row * heads + head) * slots;
    int d = i % DIM, group = i / DIM;
    start_next_kernel();
    wait_for_kernel();
    float2 sum = i < count ? sums[place + i] : make_float2(MINUS_INFINITY, 0.0f);
    float part[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        int j = group + GROUPS * u;
        part[u] = j < count ? mixed[(place + j) * DIM + d] : 0.0f;
    }
    float most = fmaxf(sum.x, sink);
    for (int j = 16; j; j /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, j));
    if (i % 32 == 0) warps[i / 32] = most;
    __syncthreads();
    most = warps[0];
#pragma unroll
    for (int j = 1; j < GROUPS * DIM / 32; j++) most = fmaxf(most, warps[j]);
    share[i] = exp2_of(sum.x - most);
    float total = sum.y * share[i];
    for (int j = 16; j; j /= 2) total += __shfl_xor_sync(~0u, total, j);
    __syncthreads();
    if (i % 32 == 0) warps[i / 32] = total;
    float x = 0.0f;
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) x = fmaf(part[u], share[group + GROUPS * u], x);
    for (int j = group + GROUPS * AT_ONCE; j < count; j += GROUPS) x = fmaf(mixed[(place + j) * DIM + d], share[j], x);
    pieces[group][d] = x;
    __syncthreads();
    if (i < DIM) {
        total = exp2_of(sink - most);
#pragma unroll
        for (int j = 0; j < GROUPS * DIM / 32; j++) total += warps[j];
        x = 0.0f;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) x += pieces[j][d];
        out[((u64)row * heads + head) * DIM + d] = x / total;
    }
}
