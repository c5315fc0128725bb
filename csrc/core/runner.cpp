#include "runner.hpp"

#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <stdexcept>
#include <thread>
#include <utility>

namespace kvtier {
namespace {

// Time for cancelled operations to be reported after a close that timed out.
constexpr Seconds kCancelGrace{0.05};

class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

void Runner::submit(std::shared_ptr<Batch> batch) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("the engine is closed");
    if (batch->ops.empty()) return completions_.push(batch->id);
    waiting_.push_back({std::move(batch), 0});
    ++batches_;
  }
  wake();
}

bool Runner::close(Seconds timeout) {
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return threads_ == 0; };
  closing_ = true;
  lock.unlock();
  wake();
  lock.lock();
  if (ended_.wait_for(lock, bounded(timeout), ended)) return true;

  cancelled_ = true;
  const std::deque<Waiting> dropped = std::exchange(waiting_, {});
  lock.unlock();
  for (const auto& [batch, next] : dropped) {
    const size_t count = batch->ops.size();
    for (size_t i = next; i < count; ++i) finish(Task(batch, i), ECANCELED);
  }
  wake();
  lock.lock();
  return ended_.wait_for(lock, kCancelGrace, ended);
}

void Runner::abandon() {
  {
    const std::unique_lock forbid(memory_);
    abandoned_ = true;
  }
  completions_.end();
}

size_t Runner::batches_in_flight() {
  const std::lock_guard lock(mutex_);
  return batches_;
}

void Runner::spawn(std::function<void()> body) {
  const AllSignalsBlocked inherited_by_the_thread;
  {
    const std::lock_guard lock(mutex_);
    ++threads_;
  }
  try {
    std::thread([self = shared_from_this(), body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), "kvtier-io");
      body();
      self->end_thread();
    }).detach();
  } catch (...) {
    end_thread();
    throw;
  }
}

void Runner::end_thread() {
  const std::lock_guard lock(mutex_);
  if (--threads_ > 0) return;
  completions_.end();
  ended_.notify_all();
}

bool Runner::admits_next() const {
  if (waiting_.empty()) return false;
  if (in_kernel_.operations == 0) return true;
  const auto& [batch, next] = waiting_.front();
  return in_kernel_.operations < limits_.operations &&
         in_kernel_.bytes + batch->ops[next].length <= limits_.bytes;
}

Task Runner::pop() {
  auto& [batch, next] = waiting_.front();
  Task task(batch, next++);
  if (next == batch->ops.size()) waiting_.pop_front();
  in_kernel_.operations += 1;
  in_kernel_.bytes += task.op().length;
  return task;
}

std::optional<Task> Runner::try_take() {
  const std::lock_guard lock(mutex_);
  if (!admits_next()) return std::nullopt;
  return pop();
}

std::optional<Task> Runner::take() {
  std::unique_lock lock(mutex_);
  work_.wait(lock, [this] { return admits_next() || (closing_ && batches_ == 0); });
  if (!admits_next()) return std::nullopt;
  Task task = pop();
  if (admits_next()) work_.notify_one();
  return task;
}

void Runner::give_back(const Task& task) {
  const std::lock_guard lock(mutex_);
  in_kernel_.operations -= 1;
  in_kernel_.bytes -= task.op().length;
  work_.notify_one();
}

void Runner::finish(const Task& task, int32_t result) {
  {
    const std::shared_lock allowed(memory_);
    if (!abandoned_) task.batch().results[task.index()] = result;
  }
  if (task.batch().unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::lock_guard lock(mutex_);
  completions_.push(task.batch().id);
  if (--batches_ == 0 && closing_) work_.notify_all();
}

bool Runner::sign(const Task& task) {
  const std::shared_lock allowed(memory_);
  if (!abandoned_) task.sign();
  return !abandoned_;
}

int32_t Runner::verify(const Task& task) {
  const std::shared_lock allowed(memory_);
  return abandoned_ ? ECANCELED : task.verify();
}

bool Runner::cancelled() {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

bool Runner::over() {
  const std::lock_guard lock(mutex_);
  return closing_ && batches_ == 0;
}

}  // namespace kvtier
