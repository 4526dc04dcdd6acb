// Which instruction set's kernels run: the best that the CPU and the system support, or a forced one.
#pragma once
#include <string>

#include "expert_kernels.h"
#include "kernels.h"

namespace headrace {

// The kernels in use. `select_isa` changes them ("scalar", "avx2", "avx512", "avx512_amx", or "" for the best) and
// returns an empty string, or why it could not.
const Kernels& kernels();
std::string select_isa(const std::string& name);
// The experts' kernels for the same CPU: all of them give the same bits, so VNNI is taken where it is.
const ExpertKernels& expert_kernels();
// Why calls of many rows go without AMX tiles; empty if they use them.
std::string why_no_tiles();
std::string supported();  // names that run here, best first, separated by spaces

}  // namespace headrace
