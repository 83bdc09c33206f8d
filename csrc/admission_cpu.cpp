// SPDX-License-Identifier: Apache-2.0
#include "admission.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace dspark {
namespace {

// Returns the rank keys, [num_steps, num_reqs]: in this order of the array, equal
// keys are admitted first come, first served.
std::vector<int32_t> make_keys(const AdmissionArgs& args) {
  const size_t num_reqs = args.num_reqs;
  std::vector<int32_t> keys(num_reqs * args.num_steps, kNoSlot);
  for (size_t row = 0; row < num_reqs; ++row) {
    const float* confidence = nullptr;
    const int32_t num_drafts = find_drafts(args, row, &confidence);
    float survival = 1.0f;
    for (int32_t step = 0; step < num_drafts; ++step) {
      survival *= clean(confidence[step]);
      keys[step * num_reqs + row] = rank_key(survival);
    }
  }
  return keys;
}

void write_offsets(const AdmissionArgs& args) {
  int32_t num_logits = 0, num_tokens = 0, num_non_draft = 0;
  args.cu_num_logits[0] = args.query_start_loc[0] = 0;
  for (int32_t row = 0; row < args.num_reqs; ++row) {
    num_non_draft += args.num_non_draft[row];
    num_logits += args.capacities[row] + args.num_bonus_tokens;
    num_tokens += args.capacities[row] + args.num_non_draft[row];
    args.cu_num_logits[row + 1] = num_logits;
    args.query_start_loc[row + 1] = num_tokens;
  }
  std::fill(args.query_start_loc + args.num_reqs + 1,
            args.query_start_loc + args.num_offsets,
            num_non_draft + args.draft_budget);
}

} // namespace

void admit_drafts_cpu(const AdmissionArgs& args) {
  const std::vector<int32_t> keys = make_keys(args);
  std::vector<int32_t> eligible;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(eligible),
               [&](int32_t key) { return key >= args.key_floor; });

  // Everything above the threshold is admitted, and as many of its equals as fit.
  int32_t threshold = args.key_floor;
  size_t num_equals = eligible.size();
  const size_t num_admitted = args.draft_budget;
  if (num_admitted == 0) {
    threshold = std::numeric_limits<int32_t>::max();
  } else if (num_admitted < eligible.size()) {
    const auto last = eligible.begin() + (num_admitted - 1);
    std::nth_element(eligible.begin(), last, eligible.end(), std::greater<>());
    threshold = *last;
    const auto num_above = std::count_if(
        eligible.begin(), last, [&](int32_t key) { return key > threshold; });
    num_equals = num_admitted - num_above;
  }

  std::fill_n(args.capacities, args.num_reqs, 0);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] < threshold) continue;
    if (keys[i] == threshold) {
      if (num_equals == 0) continue;
      --num_equals;
    }
    ++args.capacities[i % args.num_reqs];
  }
  write_offsets(args);
}

} // namespace dspark
