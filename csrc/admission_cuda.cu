// SPDX-License-Identifier: Apache-2.0
// Draft admission in one launch of one thread block: the ranking is global, and the
// keys of up to 1024 rows fit into its registers (larger batches spill some).
//
// No atomics and no order that depends on timing: ranks with equal inputs agree.
#include "admission.h"

#include <cuda_runtime.h>

namespace dspark {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Sums over the block. Each call has one barrier: it writes the buffers that the call
// before the last one read, which every thread has left by then.
struct Block {
  int32_t (*sums)[3][kMaxWarps];  // shared, [2][3][kMaxWarps]
  int64_t (*prefixes)[kMaxWarps]; // shared, [2][kMaxWarps]
  int num_warps;
  int parity = 0;

  __device__ int lane() const { return threadIdx.x % kWarp; }
  __device__ int warp() const { return threadIdx.x / kWarp; }

  // Replaces the three values by their sums over all threads.
  __device__ void add_up(int32_t (&values)[3]) {
    parity ^= 1;
    for (int i = 0; i < 3; ++i) {
      const int32_t sum = __reduce_add_sync(kAllLanes, values[i]);
      if (lane() == 0) sums[parity][i][warp()] = sum;
    }
    __syncthreads();
    for (int i = 0; i < 3; ++i) {
      const int32_t sum = lane() < num_warps ? sums[parity][i][lane()] : 0;
      values[i] = __reduce_add_sync(kAllLanes, sum);
    }
  }

  // Returns the sum over this warp's lanes up to this one.
  __device__ int64_t scan_warp(int64_t value) const {
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t before = __shfl_up_sync(kAllLanes, value, distance);
      if (lane() >= distance) value += before;
    }
    return value;
  }

  // Returns the sum over the threads before this one, and that over all of them.
  __device__ int64_t scan(int64_t value, int64_t* total) {
    parity ^= 1;
    const int64_t in_warp = scan_warp(value);
    if (lane() == kWarp - 1) prefixes[parity][warp()] = in_warp;
    __syncthreads();
    const int64_t by_warp =
        scan_warp(lane() < num_warps ? prefixes[parity][lane()] : 0);
    *total = __shfl_sync(kAllLanes, by_warp, num_warps - 1);
    const int64_t before = __shfl_sync(kAllLanes, by_warp, (warp() + kWarp - 1) % kWarp);
    return (warp() == 0 ? 0 : before) + in_warp - value;
  }
};

// One thread block. Thread t owns rows kRows * t onwards; their keys stay in registers,
// so every loop over them is unrolled.
template <int kThreads, int kRows, int kSteps>
struct Admission {
  const AdmissionArgs& args;
  Block block;
  int32_t keys[kRows][kSteps];
  bool admitted[kRows][kSteps];

  __device__ int first_row() const { return threadIdx.x * kRows; }

  __device__ void load_keys() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row() + i;
      const float* confidence = nullptr;
      const int num_drafts = row < args.num_reqs ? find_drafts(args, row, &confidence) : 0;
      float survival = 1.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        keys[i][step] = kNoSlot;
        if (step < num_drafts) {
          survival *= clean(confidence[step]);
          keys[i][step] = rank_key(survival);
        }
      }
    }
  }

  // Returns how many keys of this thread are at least `least`.
  __device__ int32_t count(int32_t least) const {
    int32_t found = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) found += keys[i][step] >= least;
    }
    return found;
  }

  // Returns the num_admitted-th largest key, or an earlier value above which there are
  // exactly as many; `num_reached` keys are at least that. Two bits of the key a round.
  // Needs num_admitted < *num_reached, the number of eligible keys.
  __device__ int32_t find_threshold(int32_t num_admitted, int32_t* num_reached) {
    int32_t threshold = 0;
    // 1.0 is 0x3F800000, so no key reaches bit 30.
    for (int shift = 28; shift >= 0 && *num_reached != num_admitted; shift -= 2) {
      const int32_t digit = 1 << shift;
      int32_t counts[3];
      for (int i = 0; i < 3; ++i) counts[i] = count(threshold + (i + 1) * digit);
      block.add_up(counts);
      // Counts fall as the digit grows: the last that still has enough is taken.
      int32_t reached = *num_reached, next = threshold;
      for (int i = 0; i < 3; ++i) {
        if (counts[i] < num_admitted) break;
        reached = counts[i];
        next = threshold + (i + 1) * digit;
      }
      *num_reached = reached;
      threshold = next;
    }
    return threshold;
  }

  // Of the keys that equal the threshold, keeps the first `num_left` by position, then
  // row.
  __device__ void drop_ties(int32_t threshold, int64_t num_left) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= args.num_steps) break;
      int64_t num_ties = 0, total = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) num_ties += keys[i][step] == threshold;
      int64_t rank = block.scan(num_ties, &total);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (keys[i][step] == threshold) admitted[i][step] = rank++ < num_left;
      }
      num_left -= total;
    }
  }

  __device__ void rank() {
    int32_t counts[3] = {count(args.key_floor), 0, 0};
    block.add_up(counts);
    int32_t threshold = args.key_floor, num_reached = counts[0];
    const int32_t num_admitted =
        args.draft_budget < num_reached ? args.draft_budget : num_reached;
    if (num_admitted < num_reached) {
      threshold = find_threshold(num_admitted, &num_reached);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        admitted[i][step] = keys[i][step] >= threshold;
      }
    }
    if (num_reached > num_admitted) {
      counts[0] = count(threshold + 1);
      counts[1] = counts[2] = 0;
      block.add_up(counts);
      drop_ties(threshold, num_admitted - counts[0]);
    }
  }

  __device__ void write_outputs() {
    int32_t capacities[kRows], num_non_draft[kRows];
    // Both offsets in one scan: neither is negative, so no carry crosses over.
    int64_t packed = 0, all = 0;
    int32_t others[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row() + i;
      capacities[i] = num_non_draft[i] = 0;
      if (row >= args.num_reqs) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) capacities[i] += admitted[i][step];
      num_non_draft[i] = args.num_non_draft[row];
      others[0] += num_non_draft[i];
      packed += (static_cast<int64_t>(capacities[i] + args.num_bonus_tokens) << 32) +
                capacities[i] + num_non_draft[i];
    }
    int64_t before = block.scan(packed, &all);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row() + i;
      if (row >= args.num_reqs) continue;
      before += (static_cast<int64_t>(capacities[i] + args.num_bonus_tokens) << 32) +
                capacities[i] + num_non_draft[i];
      args.capacities[row] = capacities[i];
      args.cu_num_logits[row + 1] = static_cast<int32_t>(before >> 32);
      args.query_start_loc[row + 1] = static_cast<int32_t>(before);
    }
    if (threadIdx.x == 0) args.cu_num_logits[0] = args.query_start_loc[0] = 0;
    // Graphs replay more rows than requests: the rest must be empty and in range.
    block.add_up(others);
    const int32_t num_tokens = others[0] + args.draft_budget;
    for (int i = args.num_reqs + 1 + threadIdx.x; i < args.num_offsets; i += kThreads) {
      args.query_start_loc[i] = num_tokens;
    }
  }
};

template <int kThreads, int kRows, int kSteps>
__global__ void __launch_bounds__(kThreads) admit_drafts_kernel(AdmissionArgs args) {
  __shared__ int32_t sums[2][3][kMaxWarps];
  __shared__ int64_t prefixes[2][kMaxWarps];
  Admission<kThreads, kRows, kSteps> admission{args, {sums, prefixes, kThreads / kWarp}};
  admission.load_keys();
  admission.rank();
  admission.write_outputs();
}

template <int kThreads, int kRows>
cudaError_t launch(const AdmissionArgs& args, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const auto kernel = args.num_steps <= 8
                          ? admit_drafts_kernel<kThreads, kRows, 8>
                          : admit_drafts_kernel<kThreads, kRows, kMaxSteps>;
  return cudaLaunchKernelEx(&config, kernel, args);
}

cudaError_t launch_for_size(const AdmissionArgs& args, void* stream) {
  if (args.num_reqs <= 64) return launch<64, 1>(args, stream);
  if (args.num_reqs <= 256) return launch<256, 1>(args, stream);
  if (args.num_reqs <= 1024) return launch<1024, 1>(args, stream);
  return launch<1024, kMaxReqs / 1024>(args, stream);
}

} // namespace

const char* admit_drafts_cuda(const AdmissionArgs& args, void* stream) {
  const cudaError_t error = launch_for_size(args, stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

} // namespace dspark
