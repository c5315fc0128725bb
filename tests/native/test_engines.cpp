#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.hpp"
#include "engine.hpp"
#include "xxh3.hpp"

using namespace kvtier;

namespace {

constexpr uint32_t kPart = 2 * kAlignment;
constexpr uint32_t kLength = 3 * kAlignment;  // a whole part and a short one
constexpr size_t kParts = 2;
constexpr unsigned kDepth = 4;
constexpr uint64_t kMaxBytes = 3 * kLength;  // tighter than the depth
constexpr Seconds kSoon{20};

class File {
 public:
  File() {
    char name[] = "kvtier-test-XXXXXX";
    fd_ = ::mkstemp(name);
    CHECK(fd_ >= 0 && ::unlink(name) == 0);
  }
  ~File() { ::close(fd_); }
  int fd() const { return fd_; }

 private:
  int fd_;
};

/// A batch over consecutive kLength pieces of a file, with all the memory it needs.
struct Work {
  Work(int fd, size_t count, bool write)
      : data(count * kLength / sizeof(Page)), sums(count * kParts), results(count, 99) {
    for (size_t i = 0; i < count; ++i) {
      ops.push_back({.offset = i * kLength,
                     .address = address() + i * kLength,
                     .seed = 100 * i,
                     .length = kLength,
                     .part_bytes = kPart,
                     .sums = static_cast<uint32_t>(i * kParts),
                     .fd = fd,
                     .write = write,
                     .collect = 0});
    }
  }

  void fill() {
    const std::vector<uint8_t> bytes = pattern(data.size() * sizeof(Page));
    std::copy(bytes.begin(), bytes.end(), data.front().bytes);
  }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data.data()); }
  bool all(int32_t result) const {
    return std::all_of(results.begin(), results.end(), [=](int32_t r) { return r == result; });
  }
  void submit(Engine& engine, uint64_t id = 1) { engine.submit(id, ops, sums, results); }
  void run(Engine& engine) {
    submit(engine, 7);
    CHECK(engine.wait(kSoon) == std::vector<uint64_t>{7});
  }

  struct alignas(kAlignment) Page {
    uint8_t bytes[kAlignment];
  };
  std::vector<Page> data;
  std::vector<uint64_t> sums;
  std::vector<int32_t> results;
  std::vector<Op> ops;
};

bool same_bytes(const Work& a, const Work& b) {
  return std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(Work::Page)) == 0;
}

void reads_what_it_wrote(Engine& engine, bool registered) {
  File file;
  Work writes(file.fd(), 200, true), reads(file.fd(), 200, false);
  writes.fill();
  if (registered) engine.register_memory(reads.address(), 200 * kLength);
  writes.run(engine);
  CHECK(writes.all(kOk));
  CHECK(writes.sums[3] == xxh3_64(writes.data[5].bytes, kAlignment, 101));
  reads.sums = writes.sums;
  reads.run(engine);
  CHECK(reads.all(kOk) && same_bytes(reads, writes));

  reads.sums[kParts * 5 + 1] ^= 1;
  reads.run(engine);
  CHECK(reads.results[5] == kChecksum &&
        std::count(reads.results.begin(), reads.results.end(), kOk) == 199);

  CHECK(::ftruncate(file.fd(), 199 * kLength + 5000) == 0);
  reads.run(engine);
  CHECK(reads.results[198] == kOk && reads.results[199] == kShort);
}

void leaves_sums_alone_when_unchecked(Engine& engine) {
  File file;
  Work writes(file.fd(), 20, true), reads(file.fd(), 20, false);
  writes.fill();
  for (Work* work : {&writes, &reads}) {
    for (Op& op : work->ops) op.part_bytes = 0;
    std::fill(work->sums.begin(), work->sums.end(), 5);
    work->run(engine);
    CHECK(work->all(kOk));
    CHECK(std::count(work->sums.begin(), work->sums.end(), 5) == 20 * kParts);
  }
  CHECK(same_bytes(reads, writes));
  CHECK(::ftruncate(file.fd(), 19 * kLength + 5000) == 0);
  reads.run(engine);
  CHECK(reads.results[18] == kOk && reads.results[19] == kShort);
}

void hands_back_the_sums_when_it_collects(Engine& engine) {
  File file;
  Work writes(file.fd(), 20, true), reads(file.fd(), 20, false);
  writes.fill();
  writes.run(engine);
  for (Op& op : reads.ops) op.collect = 1;
  reads.run(engine);
  CHECK(reads.all(kOk) && same_bytes(reads, writes) && reads.sums == writes.sums);
}

void device_errors_are_results(Engine& engine) {
  Work nowhere(-1, 3, false);
  nowhere.run(engine);
  CHECK(nowhere.all(EBADF));
  const int full = ::open("/dev/full", O_WRONLY);
  Work refused(full, 3, true);
  refused.run(engine);
  CHECK(refused.all(ENOSPC));
  ::close(full);
  Work empty(-1, 0, false);
  empty.run(engine);
}

template <typename Change>
void refuses(Engine& engine, Change change) {
  Work work(0, 1, false);
  change(work);
  try {
    work.submit(engine);
    CHECK(!"refused");
  } catch (const std::invalid_argument&) {
  }
  CHECK(engine.in_flight() == 0);
}

void refuses_malformed_batches(Engine& engine) {
  refuses(engine, [](Work& work) { work.ops[0].length = 0; });
  refuses(engine, [](Work& work) { work.ops[0].length = kLength + 512; });
  refuses(engine, [](Work& work) { work.ops[0].part_bytes = kPart + 512; });
  refuses(engine, [](Work& work) { work.ops[0].sums = 1; });
  refuses(engine, [](Work& work) { work.ops[0].sums = UINT32_MAX; });
  refuses(engine, [](Work& work) { work.results.clear(); });
}

void serves_many_threads(Engine& engine) {
  File file;
  std::vector<std::unique_ptr<Work>> works;
  for (int i = 0; i < 32; ++i) works.push_back(std::make_unique<Work>(file.fd(), 16, true));
  std::vector<std::thread> submitters;
  for (size_t first = 0; first < 4; ++first) {
    submitters.emplace_back([&, first] {
      for (size_t i = first; i < works.size(); i += 4) works[i]->submit(engine, i);
    });
  }
  std::vector<uint64_t> finished;
  while (finished.size() < works.size()) {
    const std::vector<uint64_t> ids = engine.wait(kSoon);
    CHECK(!ids.empty());
    finished.insert(finished.end(), ids.begin(), ids.end());
  }
  for (std::thread& submitter : submitters) submitter.join();
  std::sort(finished.begin(), finished.end());
  for (size_t i = 0; i < works.size(); ++i) CHECK(finished[i] == i && works[i]->all(kOk));
}

void closes_once_drained(Engine& engine) {
  CHECK(engine.wait(Seconds{0.01}).empty());
  CHECK(engine.close(kSoon) && engine.close(kSoon));
  CHECK(engine.wait(Seconds{1e300}).empty());
  CHECK(!engine.register_memory(kAlignment, kAlignment));
  try {
    Work(0, 1, false).submit(engine);
    CHECK(!"closed");
  } catch (const std::runtime_error&) {
  }
}

void dropped_while_running(const std::string& kind) {
  File file;
  Work writes(file.fd(), 100, true);
  {
    Engine engine(kind, kDepth, kMaxBytes);
    writes.submit(engine);
  }
}

void harmless_in_a_forked_child(const std::string& kind) {
  auto engine = std::make_unique<Engine>(kind, kDepth, kMaxBytes);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool quiet = engine->wait(kSoon).empty() && engine->close(kSoon);
    engine.reset();
    ::_exit(quiet ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  File file;
  Work(file.fd(), 1, true).run(*engine);
}

// An empty pipe stands for a device that does not answer; only io_uring reads one without an
// offset.
void leaves_hanging_reads_to_the_kernel() {
  int pipe[2];
  CHECK(::pipe(pipe) == 0);
  Work work(pipe[0], 3, false);
  for (Op& op : work.ops) op.offset = UINT64_MAX;
  Engine engine("uring", 1, kMaxBytes);
  work.submit(engine);
  CHECK(!engine.close(Seconds{0.1}));
  CHECK(work.results[1] == ECANCELED && work.results[2] == ECANCELED);
  // The engine is asked last: ThreadSanitizer cannot see that the pipe orders this read before the
  // kernel's answer, but sees the engine's lock.
  CHECK(work.results[0] == 99 && engine.in_flight() == 1);
  ::close(pipe[1]);
  CHECK(engine.close(kSoon) && engine.wait(kSoon).size() == 1 && work.results[0] == kShort);
  ::close(pipe[0]);
}

void test(const std::string& kind) {
  for (const bool registered : {false, true}) {
    Engine engine(kind, kDepth, kMaxBytes);
    reads_what_it_wrote(engine, registered);
    leaves_sums_alone_when_unchecked(engine);
    hands_back_the_sums_when_it_collects(engine);
    device_errors_are_results(engine);
    refuses_malformed_batches(engine);
    serves_many_threads(engine);
    closes_once_drained(engine);
  }
  dropped_while_running(kind);
  harmless_in_a_forked_child(kind);
}

}  // namespace

int main() {
  test("threads");
  const std::string refusal = probe_uring();
  std::printf("uring: %s\n", refusal.empty() ? "tested" : refusal.c_str());
  if (!refusal.empty()) return 0;
  test("uring");
  leaves_hanging_reads_to_the_kernel();
}
