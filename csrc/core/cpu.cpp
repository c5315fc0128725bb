#include "cpu.hpp"

#include <atomic>

namespace kvtier {
namespace {

VectorPath widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return VectorPath::kAvx512;
  if (__builtin_cpu_supports("avx2")) return VectorPath::kAvx2;
#endif
  return VectorPath::kPortable;
}

std::atomic<VectorPath>& current() {
  static std::atomic<VectorPath> path{widest()};
  return path;
}

}  // namespace

VectorPath vector_path() {
  return current().load(std::memory_order_relaxed);
}

bool force_vector_path(std::string_view name) {
  if (name == "auto") {
    current() = widest();
    return true;
  }
  for (const VectorPath path : {VectorPath::kPortable, VectorPath::kAvx2, VectorPath::kAvx512}) {
    if (name == name_of(path) && path <= widest()) {
      current() = path;
      return true;
    }
  }
  return false;
}

std::string_view name_of(VectorPath path) {
  switch (path) {
    case VectorPath::kAvx512:
      return "avx512";
    case VectorPath::kAvx2:
      return "avx2";
    case VectorPath::kPortable:
      break;
  }
  return "portable";
}

}  // namespace kvtier
