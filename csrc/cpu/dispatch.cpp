// csrc/cpu/dispatch.cpp: run-time choice of the instruction set, and the memory that the kernels ask for. Built for any CPU.
#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace fusedpg {

namespace generic {
const Kernels& kernels();
}
#if defined(FUSEDPG_X86)
namespace v2 {
const Kernels& kernels();
}
namespace v3 {
const Kernels& kernels();
}
namespace v4 {
const Kernels& kernels();
}
namespace v4bf16 {
const Kernels& kernels();
}
#endif

namespace {

struct Build {
  const char* name;
  bool runs_here;
  const Kernels& (*kernels)();
};

/// Best first.
const std::vector<Build>& builds() {
#if defined(FUSEDPG_X86)
  static const std::vector<Build> all = [] {
    __builtin_cpu_init();
    const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    const bool v4bf16 = v4 && __builtin_cpu_supports("avx512bf16");
    return std::vector<Build>{{"v4bf16", v4bf16, v4bf16::kernels},
                              {"v4", v4, v4::kernels},
                              {"v3", v3, v3::kernels},
                              {"v2", v2, v2::kernels},
                              {"generic", true, generic::kernels}};
  }();
#else
  static const std::vector<Build> all{{"generic", true, generic::kernels}};
#endif
  return all;
}

const Build& chosen() {
  const char* wanted = std::getenv("FUSEDPG_CPU_ISA");
  std::string valid;
  for (const Build& b : builds()) {
    if (!b.runs_here) continue;
    if (!wanted || !*wanted || std::strcmp(wanted, b.name) == 0) return b;
    valid += valid.empty() ? b.name : std::string(", ") + b.name;
  }
  throw std::invalid_argument("FUSEDPG_CPU_ISA: expected one of " + valid + " (what this machine can run), got '" + wanted +
                              "'. Unset it to use the best.");
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

void* aligned(size_t bytes) {
  void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (!p) throw std::bad_alloc();
  return p;
}

#if defined(__linux__)
/// Tells the system something of the whole pages between two addresses; it may refuse.
void advise(uintptr_t begin, uintptr_t end, uintptr_t page, int advice) {
  const uintptr_t first = (begin + page - 1) / page * page, behind = end / page * page;
  if (begin && behind > first) (void)madvise(reinterpret_cast<void*>(first), behind - first, advice);
}
#endif

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Build& b : builds())
    if (b.runs_here) names.emplace_back(b.name);
  return names;
}

std::string chosen_isa() { return chosen().name; }
const Kernels& chosen_kernels() { return chosen().kernels(); }

void* thread_scratch(Slot slot, size_t bytes) {
  constexpr size_t slots = static_cast<size_t>(Slot::count);
  thread_local std::unique_ptr<void, Free> memory[slots];
  thread_local size_t capacity[slots] = {};
  const size_t i = static_cast<size_t>(slot);
  if (capacity[i] < bytes) {
    memory[i].reset();
    capacity[i] = 0;
    memory[i].reset(aligned(bytes));
    capacity[i] = bytes;
  }
  return memory[i].get();
}

void huge_pages(uintptr_t begin, uintptr_t end) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  advise(begin, end, uintptr_t(2) << 20, MADV_HUGEPAGE);
#else
  (void)begin, (void)end;
#endif
}

void map_pages(void* begin, void* end) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  advise(reinterpret_cast<uintptr_t>(begin), reinterpret_cast<uintptr_t>(end), page, MADV_POPULATE_WRITE);
#else
  (void)begin, (void)end;
#endif
}

void* call_scratch_new(size_t bytes, bool zeroed) {
  void* p = zeroed ? std::calloc(bytes + 1, 1) : std::malloc(bytes + 1);
  if (!p) throw std::bad_alloc();
  return p;
}
void call_scratch_free(void* p) { std::free(p); }

}  // namespace fusedpg
