// A thin io_uring: set-up with fallbacks, room in the queues, registered memory.
#pragma once

#include <liburing.h>

#include <cstdint>
#include <vector>

namespace kvtier {

/// Every member must be called on the thread that made the ring.
class Ring {
 public:
  /// Room for `operations` in flight at once; throws std::system_error if the kernel refuses.
  explicit Ring(unsigned operations);
  ~Ring() { ::io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  /// An empty submission entry; submits what is queued if there is no other room.
  io_uring_sqe& next_entry();

  /// Hands queued entries to the kernel and runs its completion work; with `wait`, sleeps until
  /// there is a completion.
  void submit(bool wait);

  /// Calls visit(user_data, result) for every completion that has arrived.
  template <typename Visit>
  void reap(Visit visit) {
    io_uring_cqe* entry;
    while (::io_uring_peek_cqe(&ring_, &entry) == 0) {
      const uint64_t user_data = entry->user_data;
      const int32_t result = entry->res;
      ::io_uring_cqe_seen(&ring_, entry);
      visit(user_data, result);
    }
  }

  bool supports(int opcode);

  /// Registers the range, or nothing of it and returns false.
  bool register_memory(uint64_t address, uint64_t nbytes);

  /// The index of the registered buffer that holds the whole range, or -1.
  int buffer_of(uint64_t address, uint64_t nbytes) const;

 private:
  struct Buffer {
    uint64_t address, nbytes;
  };

  void set_buffer(size_t index, Buffer buffer, int& error);

  io_uring ring_;
  bool has_buffer_table_ = false;
  std::vector<Buffer> buffers_;
};

}  // namespace kvtier
