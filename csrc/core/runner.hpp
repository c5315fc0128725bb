// What both engines share: the queue, the limits, the lifetime. An engine adds only how to do I/O.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include "batch.hpp"
#include "completions.hpp"

namespace kvtier {

/// How much may be in the kernel at once. One operation always may, however large.
struct Limits {
  unsigned operations;
  uint64_t bytes;
};

/// Runs batches on threads of its own. Those threads share its ownership, so a runner whose last
/// operation hangs in the kernel outlives everyone else's interest in it.
class Runner : public std::enable_shared_from_this<Runner> {
 public:
  explicit Runner(Limits limits) : limits_(limits) {}
  virtual ~Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  /// Starts the threads; throws std::system_error if that, or what they need, cannot be had.
  virtual void start() = 0;

  /// Throws std::runtime_error once closed.
  void submit(std::shared_ptr<Batch> batch);

  /// Offers memory for registered I/O; false if it was not taken.
  virtual bool register_memory(uint64_t /*address*/, uint64_t /*nbytes*/) { return false; }

  /// Refuses new batches and waits for the running ones. After `timeout`, operations that have not
  /// reached the kernel end with ECANCELED. True once every thread has ended.
  bool close(Seconds timeout);

  /// From its return on, no thread of the runner touches callers' memory and no wait blocks. The
  /// kernel may still write where it was told to.
  void abandon();

  size_t batches_in_flight();
  Completions& completions() { return completions_; }

 protected:
  /// Makes the runner's threads look at the queue and at over(). Called without a lock held.
  virtual void wake() = 0;

  /// Runs `body` on a new thread that shares ownership of this and receives no signals.
  void spawn(std::function<void()> body);

  /// The next operation that the limits admit, if there is one now.
  std::optional<Task> try_take();

  /// The same, but waits for one; nothing once over. Woken by notify().
  std::optional<Task> take();
  void notify() { work_.notify_all(); }

  /// The kernel is done with `task`'s memory: its share of the limits is free again.
  void give_back(const Task& task);

  /// Records the result of `task`, and reports its batch if it was the last one.
  void finish(const Task& task, int32_t result);

  /// Stores the checksums of a write. False if the batch was abandoned: then do not write it.
  bool sign(const Task& task);

  /// The result of a read that the kernel completed.
  int32_t verify(const Task& task);

  bool cancelled();
  bool over();

  std::mutex mutex_;

 private:
  struct Waiting {
    std::shared_ptr<Batch> batch;
    size_t next;  // its first operation that has not started
  };

  bool admits_next() const;
  Task pop();
  void end_thread();

  const Limits limits_;
  Completions completions_;

  // All guarded by mutex_.
  std::condition_variable work_;
  std::condition_variable ended_;
  std::deque<Waiting> waiting_;
  Limits in_kernel_{};
  size_t batches_ = 0;
  size_t threads_ = 0;
  bool closing_ = false;
  bool cancelled_ = false;

  // Held shared while callers' memory is touched, exclusively to forbid that.
  std::shared_mutex memory_;
  bool abandoned_ = false;
};

}  // namespace kvtier
