#include "completions.hpp"

#include <utility>

namespace kvtier {

void Completions::push(uint64_t id) {
  const std::lock_guard lock(mutex_);
  finished_.push_back(id);
  event_.signal();
  changed_.notify_one();
}

void Completions::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  event_.signal();
  changed_.notify_all();
}

std::vector<uint64_t> Completions::wait(Seconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, bounded(timeout), [this] { return ended_ || !finished_.empty(); });
  if (!ended_) event_.clear();
  return std::exchange(finished_, {});
}

}  // namespace kvtier
