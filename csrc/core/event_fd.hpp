// A counter that readers can poll: the way one thread wakes another that waits on descriptors.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace kvtier {

class EventFd {
 public:
  EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~EventFd() { ::close(fd_); }
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int fd() const { return fd_; }

  /// Makes the descriptor readable. A full counter is readable already, so no failure matters.
  void signal() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(fd_, &one, sizeof one);
  }

  /// Makes the descriptor unreadable until the next signal.
  void clear() {
    uint64_t count;
    [[maybe_unused]] const ssize_t taken = ::read(fd_, &count, sizeof count);
  }

 private:
  const int fd_;
};

}  // namespace kvtier
