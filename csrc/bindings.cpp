// SPDX-License-Identifier: Apache-2.0
// The operators of vllm/_dspark_C.abi3.so, on torch's stable ABI alone: one binary for
// every torch from the one that CMakeLists.txt names, with CUDA or without.
#include "admission.h"

#include <algorithm>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#ifdef DSPARK_WITH_CUDA
// Weak: it lives in libtorch_cuda, which a CPU build of torch does not have.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace dspark {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

bool has_cuda() {
#ifdef DSPARK_WITH_CUDA
  return aoti_torch_get_current_cuda_stream != nullptr;
#else
  return false;
#endif
}

// What the operator returns; capacity_native.py has the words. Nothing is thrown: a
// compiler may link its own C++ library into this one, and an exception that torch's
// then has to catch ends the process.
enum Status : int64_t { kDone = 0, kSizes = 1, kTypes = 2, kStream = 3, kLaunch = 4 };

Status launch_on_current_stream([[maybe_unused]] const AdmissionArgs& args,
                                [[maybe_unused]] int32_t device_index) {
#ifdef DSPARK_WITH_CUDA
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    return kStream;
  }
  if (admit_drafts_cuda(args, stream) != nullptr) return kLaunch;
#endif
  return kDone;
}

bool is_int32(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Int; }

int64_t admit_drafts(const Tensor& confidence_probs, const Tensor& idx_mapping,
                     const Tensor& scheduled_drafts, const Tensor& num_non_draft_tokens,
                     int64_t draft_budget, int64_t num_bonus_tokens, bool fill_budget,
                     double min_survival, const Tensor& capacities_out,
                     const Tensor& cu_num_logits_out,
                     const Tensor& query_start_loc_out) {
  const int64_t num_reqs = idx_mapping.numel();
  const int64_t num_offsets = query_start_loc_out.numel();
  // The Python side has checked everything, in words for users. This keeps a call of
  // the bare operator within its tensors.
  const bool fits =
      confidence_probs.dim() == 2 && confidence_probs.size(1) <= kMaxSteps &&
      num_reqs <= kMaxReqs && scheduled_drafts.numel() == num_reqs &&
      num_non_draft_tokens.numel() == num_reqs && capacities_out.numel() >= num_reqs &&
      cu_num_logits_out.numel() > num_reqs && num_offsets > num_reqs;
  if (!fits) return kSizes;
  AdmissionArgs args;
  args.idx_is_int64 = idx_mapping.scalar_type() == ScalarType::Long;
  const bool typed = confidence_probs.scalar_type() == ScalarType::Float &&
                     (args.idx_is_int64 || is_int32(idx_mapping)) &&
                     is_int32(scheduled_drafts) && is_int32(num_non_draft_tokens) &&
                     is_int32(capacities_out) && is_int32(cu_num_logits_out) &&
                     is_int32(query_start_loc_out);
  if (!typed) return kTypes;

  args.confidence = static_cast<const float*>(confidence_probs.const_data_ptr());
  args.idx_mapping = idx_mapping.const_data_ptr();
  args.scheduled = static_cast<const int32_t*>(scheduled_drafts.const_data_ptr());
  args.num_non_draft =
      static_cast<const int32_t*>(num_non_draft_tokens.const_data_ptr());
  args.capacities = static_cast<int32_t*>(capacities_out.mutable_data_ptr());
  args.cu_num_logits = static_cast<int32_t*>(cu_num_logits_out.mutable_data_ptr());
  args.query_start_loc = static_cast<int32_t*>(query_start_loc_out.mutable_data_ptr());
  args.confidence_stride = confidence_probs.stride(0);
  args.num_slots = confidence_probs.size(0);
  args.num_steps = static_cast<int32_t>(confidence_probs.size(1));
  args.num_reqs = static_cast<int32_t>(num_reqs);
  args.num_offsets = static_cast<int32_t>(num_offsets);
  args.draft_budget = static_cast<int32_t>(draft_budget);
  // Without filling, never the key of survival 0.
  const int32_t key_floor = rank_key(static_cast<float>(min_survival));
  args.key_floor = fill_budget ? 0 : std::max(1, key_floor);
  args.num_bonus_tokens = static_cast<int32_t>(num_bonus_tokens);

  if (!confidence_probs.is_cpu()) {
    return launch_on_current_stream(args, confidence_probs.get_device_index());
  }
  admit_drafts_cpu(args);
  return kDone;
}

} // namespace
} // namespace dspark

STABLE_TORCH_LIBRARY(_dspark_C, library) {
  library.def(
      "admit_drafts(Tensor confidence_probs, Tensor idx_mapping, Tensor "
      "scheduled_drafts, Tensor num_non_draft_tokens, int draft_budget, int "
      "num_bonus_tokens, bool fill_budget, float min_survival, Tensor(a!) "
      "capacities_out, Tensor(b!) cu_num_logits_out, Tensor(c!) "
      "query_start_loc_out) -> int");
  library.def("has_cuda() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(_dspark_C, CompositeExplicitAutograd, library) {
  library.impl("has_cuda", TORCH_BOX(&dspark::has_cuda));
}

STABLE_TORCH_LIBRARY_IMPL(_dspark_C, CPU, library) {
  library.impl("admit_drafts", TORCH_BOX(&dspark::admit_drafts));
}

#ifdef DSPARK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(_dspark_C, CUDA, library) {
  library.impl("admit_drafts", TORCH_BOX(&dspark::admit_drafts));
}
#endif
