// SPDX-License-Identifier: Apache-2.0
// Runs the kernels of csrc/ on a CPU, for tests: one block, a fiber for each thread.
//
// It stands in for CUDA's header of this name and knows what those kernels use. Fibers
// change only where threads wait, in an order that differs from launch to launch: a
// barrier that is missing lets one read what another has not written yet.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(num_threads)

struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

namespace emulated {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Barrier {
  int num_waiting = 0;
  int round = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
};

struct Block {
  explicit Block(int num_threads)
      : fibers(num_threads), values(num_threads), warps(num_threads / kWarp) {}

  std::vector<Fiber> fibers;
  std::vector<int64_t> values; // what the lanes of a warp show each other
  std::vector<Barrier> warps;
  Barrier all;
  std::function<void()> program;
  ucontext_t host;
  int current = 0;
  int stride = 1; // odd, so that every fiber gets its turn

  int size() const { return static_cast<int>(fibers.size()); }

  // Goes on with another fiber of `count` from `first` on that has not ended.
  void yield(int first, int count, int stride) {
    Fiber& from = fibers[current];
    int next = current - first;
    for (int i = 0; i < count; ++i) {
      next = (next + stride) % count;
      if (!fibers[first + next].done) {
        current = first + next;
        if (&fibers[current] != &from) {
          swapcontext(&from.context, &fibers[current].context);
        }
        return;
      }
    }
    swapcontext(&from.context, &host);
  }

  // A warp waits among its own lanes, so it runs ahead of the others to the next
  // barrier of the block.
  void wait(Barrier& barrier, int first, int count, int stride) {
    const int round = barrier.round;
    if (++barrier.num_waiting == count) {
      barrier.num_waiting = 0;
      ++barrier.round;
    }
    while (barrier.round == round) yield(first, count, stride);
  }

  void wait_for_all() { wait(all, 0, size(), stride); }
  void wait_for_warp() {
    wait(warps[current / kWarp], current / kWarp * kWarp, kWarp, 1);
  }
};

inline Block* block = nullptr;

inline void run_fiber() {
  block->program();
  block->fibers[block->current].done = true;
  block->yield(0, block->size(), block->stride);
}

// Shows `value` to the warp and returns what `read` makes of all lanes' values.
template <typename T, typename Read>
T exchange(unsigned mask, T value, Read read) {
  if (mask != 0xffffffffu) std::abort();
  const int thread = block->current, first = thread / kWarp * kWarp;
  block->values[thread] = value;
  block->wait_for_warp();
  const T result = static_cast<T>(read(&block->values[first], thread - first));
  block->wait_for_warp();
  return result;
}

struct ThreadIndex {
  struct {
    operator int() const { return block->current; }
  } x;
};

} // namespace emulated

inline emulated::ThreadIndex threadIdx;

inline void __syncthreads() { emulated::block->wait_for_all(); }

inline int32_t __reduce_add_sync(unsigned mask, int32_t value) {
  return emulated::exchange(mask, value, [](const int64_t* values, int) {
    int64_t sum = 0;
    for (int lane = 0; lane < emulated::kWarp; ++lane) sum += values[lane];
    return sum;
  });
}

inline int64_t __shfl_sync(unsigned mask, int64_t value, int source) {
  return emulated::exchange(
      mask, value, [=](const int64_t* values, int) { return values[source]; });
}

inline int64_t __shfl_up_sync(unsigned mask, int64_t value, int distance) {
  return emulated::exchange(mask, value, [=](const int64_t* values, int lane) {
    return values[lane < distance ? lane : lane - distance];
  });
}

template <typename Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args),
                               const Args& args) {
  static int num_launches = 0;
  emulated::Block block(config->blockDim.x);
  block.stride = 1 + 2 * (num_launches++ % 16);
  block.program = [&] { kernel(args); };
  emulated::block = &block;
  for (emulated::Fiber& fiber : block.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = emulated::kStackBytes;
    makecontext(&fiber.context, emulated::run_fiber, 0);
  }
  swapcontext(&block.host, &block.fibers[0].context);
  emulated::block = nullptr;
  return cudaSuccess;
}
