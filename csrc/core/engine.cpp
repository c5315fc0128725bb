#include "engine.hpp"

#include <unistd.h>

#include <stdexcept>

#include "thread_engine.hpp"
#if KVTIER_HAS_URING
#include "ring_engine.hpp"
#endif

namespace kvtier {
namespace {

constexpr unsigned kMostThreads = 1024;
constexpr unsigned kDeepestRing = 8192;

void check_depth(unsigned depth, unsigned most) {
  if (depth == 0 || depth > most)
    throw std::invalid_argument("depth must be from 1 to " + std::to_string(most));
}

std::shared_ptr<Runner> make_runner(const std::string& kind, unsigned depth, uint64_t max_bytes) {
  if (max_bytes == 0) throw std::invalid_argument("max_bytes must be positive");
  if (kind == "threads") {
    check_depth(depth, kMostThreads);
    return std::make_shared<ThreadRunner>(depth, max_bytes);
  }
  if (kind == "uring") {
    check_depth(depth, kDeepestRing);
#if KVTIER_HAS_URING
    return std::make_shared<RingRunner>(depth, max_bytes);
#else
    throw std::runtime_error("this build has no io_uring: " + probe_uring());
#endif
  }
  throw std::invalid_argument("kind must be \"uring\" or \"threads\", not \"" + kind + "\"");
}

}  // namespace

bool has_uring() {
  return KVTIER_HAS_URING;
}

#if !KVTIER_HAS_URING
std::string probe_uring() {
  return "built without liburing";
}
#endif

Engine::Engine(const std::string& kind, unsigned depth, uint64_t max_bytes)
    : owner_(::getpid()), runner_(make_runner(kind, depth, max_bytes)) {
  runner_->start();
}

Engine::~Engine() {
  if (in_forked_child()) return;
  runner_->close(Seconds{0});
  runner_->abandon();
}

bool Engine::in_forked_child() const {
  return ::getpid() != owner_;
}

void Engine::submit(uint64_t id, std::span<const Op> ops, std::span<uint64_t> sums,
                    std::span<int32_t> results) {
  if (in_forked_child()) throw std::runtime_error("the engine belongs to the parent process");
  runner_->submit(std::make_shared<Batch>(id, ops, sums, results));
}

std::vector<uint64_t> Engine::wait(Seconds timeout) {
  if (in_forked_child()) return {};
  return runner_->completions().wait(timeout);
}

bool Engine::register_memory(uint64_t address, uint64_t nbytes) {
  return !in_forked_child() && runner_->register_memory(address, nbytes);
}

bool Engine::close(Seconds timeout) {
  return in_forked_child() || runner_->close(timeout);
}

void Engine::abandon() {
  if (!in_forked_child()) runner_->abandon();
}

size_t Engine::in_flight() {
  return in_forked_child() ? 0 : runner_->batches_in_flight();
}

}  // namespace kvtier
