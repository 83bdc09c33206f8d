// SPDX-License-Identifier: Apache-2.0
// What both implementations of draft admission are given, and the rule of one slot.
//
// The rule and every argument are documented in
// vllm/v1/worker/gpu/spec_decode/dspark/capacity.py.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DSPARK_INLINE __host__ __device__ inline
#else
#define DSPARK_INLINE inline
#endif

namespace dspark {

// As in capacity_checks.py.
constexpr int64_t kMaxReqs = 4096;
constexpr int64_t kMaxSteps = 16;

// Rank key of what is no slot: below every floor.
constexpr int32_t kNoSlot = -1;

struct AdmissionArgs {
  const float* confidence;      // [num_slots, num_steps], rows strided
  const void* idx_mapping;      // [num_reqs], int32 or int64
  const int32_t* scheduled;     // [num_reqs]
  const int32_t* num_non_draft; // [num_reqs]
  int32_t* capacities;          // [>= num_reqs], written
  int32_t* cu_num_logits;       // [>= num_reqs + 1], written
  int32_t* query_start_loc;     // [num_offsets], written
  int64_t confidence_stride;
  int64_t num_slots;
  int32_t num_steps;
  int32_t num_reqs;
  int32_t num_offsets;
  int32_t draft_budget;
  int32_t key_floor; // least rank key that is admitted
  int32_t num_bonus_tokens;
  bool idx_is_int64;
};

// Returns the drafts of a row that may be admitted, and its confidences: none for
// padding, which must not read another request's.
DSPARK_INLINE int32_t find_drafts(const AdmissionArgs& args, int32_t row,
                                  const float** confidence) {
  const int64_t slot = args.idx_is_int64
                           ? static_cast<const int64_t*>(args.idx_mapping)[row]
                           : static_cast<const int32_t*>(args.idx_mapping)[row];
  if (slot < 0 || slot >= args.num_slots) return 0;
  *confidence = args.confidence + slot * args.confidence_stride;
  const int32_t scheduled = args.scheduled[row];
  return scheduled < args.num_steps ? scheduled : args.num_steps;
}

// Clamps to [0, 1]. NaN counts as 1. A comparison, not a maximum: -0.0 must become
// +0.0, or its bits rank wrong.
DSPARK_INLINE float clean(float confidence) {
  if (confidence != confidence) return 1.0f;
  if (!(confidence > 0.0f)) return 0.0f;
  return confidence < 1.0f ? confidence : 1.0f;
}

// Non-negative floats order like their bits.
DSPARK_INLINE int32_t rank_key(float survival) {
  int32_t bits;
  std::memcpy(&bits, &survival, sizeof(bits));
  return bits;
}

void admit_drafts_cpu(const AdmissionArgs& args);

// Launches one kernel on `stream`. Returns nullptr, or what went wrong.
const char* admit_drafts_cuda(const AdmissionArgs& args, void* stream);

} // namespace dspark
