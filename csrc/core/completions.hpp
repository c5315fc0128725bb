// Finished batches on their way to whoever waits for them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "event_fd.hpp"

namespace kvtier {

using Seconds = std::chrono::duration<double>;

/// A timeout that condition variables can add to "now" without overflow; NaN becomes zero.
inline std::chrono::nanoseconds bounded(Seconds timeout) {
  constexpr Seconds kForever{1e8};
  if (!(timeout.count() > 0)) return {};
  return std::chrono::duration_cast<std::chrono::nanoseconds>(timeout < kForever ? timeout
                                                                                 : kForever);
}

class Completions {
 public:
  void push(uint64_t id);

  /// From now on no wait blocks.
  void end();

  /// The ids pushed since the last call; blocks up to `timeout` while there are none.
  std::vector<uint64_t> wait(Seconds timeout);

  /// Readable while ids wait to be taken, and after end().
  int fd() const { return event_.fd(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> finished_;
  bool ended_ = false;
  EventFd event_;
};

}  // namespace kvtier
