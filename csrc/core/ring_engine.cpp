#include "ring_engine.hpp"

#include <poll.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "ring.hpp"

namespace kvtier {
namespace {

constexpr uint64_t kWake = UINT64_MAX;  // user_data of the poll on wake_
constexpr unsigned kPolls = 1;

}  // namespace

RingRunner::RingRunner(unsigned operations, uint64_t max_bytes)
    : Runner({operations, max_bytes}), operations_(operations), slots_(operations) {
  for (size_t slot = operations; slot-- > 0;) free_slots_.push_back(slot);
}

void RingRunner::start() {
  // The ring is made on its thread because the kernel may tie it to its maker.
  const auto started = std::make_shared<std::promise<void>>();
  spawn([this, started] { run(*started); });
  started->get_future().get();
}

bool RingRunner::register_memory(uint64_t address, uint64_t nbytes) {
  Command command([=](Ring& ring) { return ring.register_memory(address, nbytes); });
  std::future<bool> taken = command.get_future();
  {
    const std::lock_guard lock(mutex_);
    if (!accepts_commands_) return false;
    commands_.push_back(std::move(command));
  }
  wake();
  return taken.get();
}

void RingRunner::run(std::promise<void>& started) {
  std::optional<Ring> ring;
  try {
    ring.emplace(operations_ + kPolls);
  } catch (...) {
    started.set_exception(std::current_exception());
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    accepts_commands_ = true;
  }
  started.set_value();
  loop(*ring);
  {
    const std::lock_guard lock(mutex_);
    accepts_commands_ = false;
  }
  run_commands(*ring);
}

void RingRunner::loop(Ring& ring) {
  watch_wake(ring);
  while (!over()) {
    run_commands(ring);
    const bool more_to_start = start_waiting(ring);
    ring.submit(/*wait=*/!more_to_start && unchecked_.empty());
    ring.reap([&](uint64_t user_data, int32_t result) { on_completion(ring, user_data, result); });
    check_one();
  }
}

void RingRunner::run_commands(Ring& ring) {
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) command(ring);
}

// Returns true if it stopped early: a write's checksum took time, so submit before the next one.
bool RingRunner::start_waiting(Ring& ring) {
  while (!free_slots_.empty()) {
    std::optional<Task> task = try_take();
    if (!task) return false;
    const size_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = std::move(task);
    const bool writes = slots_[slot]->writes();
    if (writes && !sign(*slots_[slot])) {
      retire(slot, ECANCELED);
      continue;
    }
    issue(ring, slot);
    if (writes) return true;
  }
  return false;
}

void RingRunner::issue(Ring& ring, size_t slot) {
  const Task& task = *slots_[slot];
  io_uring_sqe& entry = ring.next_entry();
  const int buffer = ring.buffer_of(reinterpret_cast<uint64_t>(task.memory()), task.remaining());
  const int fd = task.op().fd;
  if (buffer < 0 && task.writes())
    ::io_uring_prep_write(&entry, fd, task.memory(), task.remaining(), task.offset());
  else if (buffer < 0)
    ::io_uring_prep_read(&entry, fd, task.memory(), task.remaining(), task.offset());
  else if (task.writes())
    ::io_uring_prep_write_fixed(&entry, fd, task.memory(), task.remaining(), task.offset(), buffer);
  else
    ::io_uring_prep_read_fixed(&entry, fd, task.memory(), task.remaining(), task.offset(), buffer);
  ::io_uring_sqe_set_data64(&entry, slot);
}

void RingRunner::watch_wake(Ring& ring) {
  io_uring_sqe& entry = ring.next_entry();
  ::io_uring_prep_poll_add(&entry, wake_.fd(), POLLIN);
  ::io_uring_sqe_set_data64(&entry, kWake);
}

void RingRunner::on_completion(Ring& ring, uint64_t user_data, int32_t returned) {
  if (user_data == kWake) {
    wake_.clear();
    return watch_wake(ring);
  }
  const size_t slot = user_data;
  if (const auto result = slots_[slot]->advance(returned))
    retire(slot, *result);
  else if (cancelled())
    retire(slot, ECANCELED);
  else
    issue(ring, slot);
}

// The kernel has let go of the operation; good reads are yet to be checked.
void RingRunner::retire(size_t slot, int32_t result) {
  Task task = std::move(*slots_[slot]);
  slots_[slot].reset();
  free_slots_.push_back(slot);
  give_back(task);
  if (result == kOk && !task.writes())
    unchecked_.push_back(std::move(task));
  else
    finish(task, result);
}

// One at a time, so that the ring is refilled between two checks.
void RingRunner::check_one() {
  if (unchecked_.empty()) return;
  const Task task = std::move(unchecked_.front());
  unchecked_.pop_front();
  finish(task, verify(task));
}

}  // namespace kvtier
