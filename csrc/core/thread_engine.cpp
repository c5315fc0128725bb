#include "thread_engine.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

namespace kvtier {
namespace {

int64_t transfer_once(const Task& task) {
  const auto offset = static_cast<off_t>(task.offset());
  const ssize_t moved = task.writes()
                            ? ::pwrite(task.op().fd, task.memory(), task.remaining(), offset)
                            : ::pread(task.op().fd, task.memory(), task.remaining(), offset);
  return moved < 0 ? -errno : moved;
}

}  // namespace

void ThreadRunner::start() {
  try {
    for (unsigned i = 0; i < pool_size_; ++i) spawn([this] { work(); });
  } catch (...) {
    close(Seconds{1});
    throw;
  }
}

void ThreadRunner::work() {
  while (auto task = take()) {
    int32_t result = transfer(*task);
    give_back(*task);
    if (result == kOk && !task->writes()) result = verify(*task);
    finish(*task, result);
  }
}

int32_t ThreadRunner::transfer(Task& task) {
  if (task.writes() && !sign(task)) return ECANCELED;
  while (!cancelled()) {
    if (const auto result = task.advance(transfer_once(task))) return *result;
  }
  return ECANCELED;
}

}  // namespace kvtier
