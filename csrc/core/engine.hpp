// The engine as its owner sees it: submit batches, wait for their ids, close.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runner.hpp"

namespace kvtier {

/// True if this build has io_uring.
bool has_uring();

/// Why io_uring does not work here, found by using it; empty if it works.
std::string probe_uring();

/// Thread-safe. In a forked child every call is harmless: submit throws, the rest does nothing.
class Engine {
 public:
  /// `kind` is "uring" (`depth` operations in the kernel) or "threads" (`depth` threads).
  /// Throws std::invalid_argument for wrong arguments, std::system_error if the system refuses.
  Engine(const std::string& kind, unsigned depth, uint64_t max_bytes);

  /// Never blocks for long: what the kernel still holds is left to it.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void submit(uint64_t id, std::span<const Op> ops, std::span<uint64_t> sums,
              std::span<int32_t> results);

  /// Ids of finished batches, each exactly once. Empty after `timeout` without any, and at once
  /// when the engine has been drained or abandoned and all ids were taken.
  std::vector<uint64_t> wait(Seconds timeout);

  /// An eventfd that is readable while wait() would not block.
  int fileno() const { return runner_->completions().fd(); }

  bool register_memory(uint64_t address, uint64_t nbytes);
  bool close(Seconds timeout);
  void abandon();
  size_t in_flight();

 private:
  bool in_forked_child() const;

  const pid_t owner_;
  const std::shared_ptr<Runner> runner_;
};

}  // namespace kvtier
