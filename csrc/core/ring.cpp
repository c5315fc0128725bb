#include "ring.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "engine.hpp"

// Kernel interface constants that headers older than the kernel lack.
#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace kvtier {
namespace {

constexpr uint64_t kMostBytesPerBuffer = uint64_t{1} << 30;  // the kernel's limit
constexpr unsigned kBufferTable = 4096;                      // 4 TiB

// From the best to what every kernel with io_uring takes.
constexpr unsigned kSetupFlags[] = {
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER |
        IORING_SETUP_DEFER_TASKRUN,
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
    0,
};

const char* hint(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      return " (seccomp or kernel.io_uring_disabled)";
    case ENOSYS:
      return " (the kernel has no io_uring)";
    case ENOMEM:
      return " (RLIMIT_MEMLOCK is too small)";
    default:
      return "";
  }
}

}  // namespace

Ring::Ring(unsigned operations) {
  int error = 0;
  for (const unsigned flags : kSetupFlags) {
    error = -::io_uring_queue_init(operations, &ring_, flags);
    if (error != EINVAL) break;
  }
  if (error != 0) throw std::system_error(error, std::system_category(), "io_uring_queue_init");
}

io_uring_sqe& Ring::next_entry() {
  for (;;) {
    if (io_uring_sqe* entry = ::io_uring_get_sqe(&ring_)) return *entry;
    submit(false);
  }
}

void Ring::submit(bool wait) {
  const int error =
      wait ? -::io_uring_submit_and_wait(&ring_, 1) : -::io_uring_submit_and_get_events(&ring_);
  // What the kernel did not take stays queued for the next call. EINTR wants nothing, EBUSY wants
  // its completions reaped; anything else is a shortage that time may end.
  if (error > 0 && error != EINTR && error != EBUSY) ::usleep(1000);
}

bool Ring::supports(int opcode) {
  io_uring_probe* probe = ::io_uring_get_probe_ring(&ring_);
  if (probe == nullptr) return false;
  const bool supported = ::io_uring_opcode_supported(probe, opcode) != 0;
  ::io_uring_free_probe(probe);
  return supported;
}

void Ring::set_buffer(size_t index, Buffer buffer, int& error) {
  const iovec range{reinterpret_cast<void*>(buffer.address), buffer.nbytes};
  const __u64 no_tag = 0;
  const int done = ::io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index),
                                                          &range, &no_tag, 1);
  error = done < 0 ? -done : 0;
}

bool Ring::register_memory(uint64_t address, uint64_t nbytes) {
  if (!has_buffer_table_)
    has_buffer_table_ = ::io_uring_register_buffers_sparse(&ring_, kBufferTable) == 0;
  const uint64_t pieces = nbytes / kMostBytesPerBuffer + (nbytes % kMostBytesPerBuffer != 0);
  const size_t before = buffers_.size();
  if (!has_buffer_table_ || pieces == 0 || pieces > kBufferTable - before) return false;

  int error = 0;
  for (uint64_t at = 0; at < nbytes && error == 0; at += kMostBytesPerBuffer) {
    const Buffer buffer{address + at, std::min(kMostBytesPerBuffer, nbytes - at)};
    set_buffer(buffers_.size(), buffer, error);
    if (error == 0) buffers_.push_back(buffer);
  }
  if (error == 0) return true;
  for (int ignored; buffers_.size() > before; buffers_.pop_back())
    set_buffer(buffers_.size() - 1, Buffer{}, ignored);
  return false;
}

int Ring::buffer_of(uint64_t address, uint64_t nbytes) const {
  const auto holds = [=](const Buffer& buffer) {
    return address >= buffer.address && address - buffer.address < buffer.nbytes &&
           nbytes <= buffer.nbytes - (address - buffer.address);
  };
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), holds);
  return found == buffers_.end() ? -1 : static_cast<int>(found - buffers_.begin());
}

std::string probe_uring() {
  try {
    Ring ring(8);
    for (const int opcode : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                             IORING_OP_WRITE_FIXED, IORING_OP_POLL_ADD}) {
      if (!ring.supports(opcode)) return "the kernel's io_uring is too old";
    }
    ::io_uring_prep_nop(&ring.next_entry());
    ring.submit(true);
    int32_t result = -EAGAIN;
    ring.reap([&](uint64_t, int32_t returned) { result = returned; });
    return result == 0 ? "" : "a no-op failed: " + std::generic_category().message(-result);
  } catch (const std::system_error& error) {
    return error.what() + std::string(hint(error.code().value()));
  }
}

}  // namespace kvtier
