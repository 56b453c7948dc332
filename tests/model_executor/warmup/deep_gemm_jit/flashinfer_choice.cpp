// Prints which kernel FlashInfer's own choice takes for 1..last tokens, a line each.
// What stands before its header is what nvcc would bring; nothing of it is called.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

using std::min;
static uint3 blockIdx, threadIdx;
static dim3 gridDim, blockDim;
static int __shfl_sync(unsigned, int value, int) { return value; }

#include "deep_gemm/jit_utils.cuh"

int main(int, char** argv) {
  int const n = std::atoi(argv[1]), k = std::atoi(argv[2]);
  int const groups = std::atoi(argv[3]), sms = std::atoi(argv[4]);
  int const last = std::atoi(argv[5]), swapped_below = std::atoi(argv[6]);
  for (int tokens = 1; tokens <= last; ++tokens) {
    bool const swapped = tokens < swapped_below;
    auto const [rows, columns, stages, multicast, bytes] =
        swapped ? deep_gemm::jit::get_best_gemm_config(n, tokens, k, groups, sms,
                                                       false, true)
                : deep_gemm::jit::get_best_gemm_config(tokens, n, k, groups, sms);
    std::printf("%d %d %d %d %d\n", swapped, rows, columns, stages, multicast);
  }
}
