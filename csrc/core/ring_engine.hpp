// io_uring: one thread owns the ring, keeps it full, and checks parts while the kernel works.
#pragma once

#include <deque>
#include <future>
#include <optional>
#include <vector>

#include "event_fd.hpp"
#include "runner.hpp"

namespace kvtier {

class Ring;

class RingRunner final : public Runner {
 public:
  RingRunner(unsigned operations, uint64_t max_bytes);

  void start() override;
  bool register_memory(uint64_t address, uint64_t nbytes) override;

 private:
  using Command = std::packaged_task<bool(Ring&)>;

  void wake() override { wake_.signal(); }

  // All of these run on the ring's thread.
  void run(std::promise<void>& started);
  void loop(Ring& ring);
  void run_commands(Ring& ring);
  bool start_waiting(Ring& ring);
  void issue(Ring& ring, size_t slot);
  void watch_wake(Ring& ring);
  void on_completion(Ring& ring, uint64_t user_data, int32_t returned);
  void retire(size_t slot, int32_t result);
  void check_one();

  const unsigned operations_;
  EventFd wake_;
  std::vector<Command> commands_;  // guarded by mutex_
  bool accepts_commands_ = false;  // guarded by mutex_

  std::vector<std::optional<Task>> slots_;  // operations in the kernel; the index is user_data
  std::vector<size_t> free_slots_;
  std::deque<Task> unchecked_;  // reads that the kernel completed
};

}  // namespace kvtier
