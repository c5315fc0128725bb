// Blocking preads and pwrites on a pool of threads: works on every kernel and file system.
#pragma once

#include "runner.hpp"

namespace kvtier {

class ThreadRunner final : public Runner {
 public:
  /// As many threads as operations may be in the kernel.
  ThreadRunner(unsigned threads, uint64_t max_bytes)
      : Runner({threads, max_bytes}), pool_size_(threads) {}

  void start() override;

 private:
  void wake() override { notify(); }
  void work();
  int32_t transfer(Task& task);

  const unsigned pool_size_;
};

}  // namespace kvtier
