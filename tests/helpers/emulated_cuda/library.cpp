// SPDX-License-Identifier: Apache-2.0
// The operators of csrc/ with CUDA's admission kernel behind the CPU's name.
#include "../../../csrc/admission_cuda.cu"
#include "../../../csrc/bindings.cpp"

namespace dspark {

void admit_drafts_cpu(const AdmissionArgs& args) { admit_drafts_cuda(args, nullptr); }

} // namespace dspark
