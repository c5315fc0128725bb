#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind.hpp"
#include "engine.hpp"

namespace kvtier::bind {
namespace {

using GilReleased = nb::call_guard<nb::gil_scoped_release>;

std::span<const Op> ops_of(const Array<const uint8_t>& bytes) {
  if (bytes.size() % sizeof(Op) != 0)
    throw std::invalid_argument("ops must hold whole operations of 48 bytes");
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(Op) != 0)
    throw std::invalid_argument("ops must be aligned to 8 bytes");
  return {reinterpret_cast<const Op*>(bytes.data()), bytes.size() / sizeof(Op)};
}

void submit(Engine& engine, uint64_t id, const Array<const uint8_t>& ops,
            const Array<uint64_t>& sums, const Array<int32_t>& results) {
  const auto records = ops_of(ops);
  const nb::gil_scoped_release released;
  engine.submit(id, records, span_of(sums), span_of(results));
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<Engine>(module, "Engine", "Runs batches of checked reads and writes.")
      .def(nb::init<const std::string&, unsigned, uint64_t>(), nb::arg("kind"), nb::arg("depth"),
           nb::arg("max_bytes"), GilReleased())
      .def("submit", &submit, nb::arg("id"), nb::arg("ops").noconvert(),
           nb::arg("sums").noconvert(), nb::arg("results").noconvert(),
           "Starts a batch. The caller keeps sums, results and all memory alive until its id "
           "comes out of wait().")
      .def(
          "wait", [](Engine& engine, double timeout) { return engine.wait(Seconds{timeout}); },
          nb::arg("timeout_s"), GilReleased(),
          "Ids of finished batches; [] after the timeout, and at once when no more will come.")
      .def("fileno", &Engine::fileno, "An eventfd, readable while wait() would not block.")
      .def("register", &Engine::register_memory, nb::arg("address"), nb::arg("nbytes"),
           GilReleased(), "Offers mapped memory for registered I/O; True if it was taken.")
      .def(
          "close", [](Engine& engine, double timeout) { return engine.close(Seconds{timeout}); },
          nb::arg("timeout_s"), GilReleased(),
          "Refuses new batches and waits; True if the kernel holds no memory any more.")
      .def("abandon", &Engine::abandon, GilReleased(),
           "Ends every wait and never touches callers' memory again; the kernel still may.")
      .def("in_flight", &Engine::in_flight, GilReleased(), "Batches that have not finished.");
  module.def("probe_uring", &probe_uring, GilReleased(),
             "Why io_uring does not work here; empty if it does.");
  module.attr("has_uring") = has_uring();
}

}  // namespace kvtier::bind
