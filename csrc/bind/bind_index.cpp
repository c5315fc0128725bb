// Many lookups of kvtier/index/table.py's KeyTable in one call. Its columns stay Python's.
#include <cstring>
#include <stdexcept>

#include "bind.hpp"

namespace kvtier::bind {
namespace {

constexpr Py_ssize_t kKeyBytes = 32;
constexpr int32_t kEmpty = -1;

/// The memory of a Python object, until the end of the scope.
class Memory {
 public:
  Memory(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Memory() { PyBuffer_Release(&view_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return static_cast<char*>(view_.buf); }
  Py_ssize_t size() const { return view_.len; }

 private:
  Py_buffer view_;
};

const char* key_at(nb::handle key) {
  if (!PyBytes_Check(key.ptr()) || PyBytes_GET_SIZE(key.ptr()) != kKeyBytes)
    throw std::invalid_argument("a key must be 32 bytes");
  return PyBytes_AS_STRING(key.ptr());
}

/// Python's own hash, as the Python paths use it: it is seeded for each process.
size_t hash_of(nb::handle key) {
  const Py_hash_t hash = PyObject_Hash(key.ptr());
  if (hash == -1) throw nb::python_error();
  return static_cast<size_t>(hash);
}

/// The two columns of a table: rows by place, a power of two of them, and keys by row.
class Table {
 public:
  Table(nb::handle rows, nb::handle keys)
      : rows_memory_(rows, PyBUF_WRITABLE), keys_memory_(keys, PyBUF_WRITABLE) {
    const Py_ssize_t places = rows_memory_.size() / Py_ssize_t{sizeof(int32_t)};
    if (places == 0 || (places & (places - 1)) != 0)
      throw std::invalid_argument("rows must hold a power of two of int32");
    mask_ = static_cast<size_t>(places) - 1;
    rows_ = reinterpret_cast<int32_t*>(rows_memory_.data());
  }

  int32_t find(nb::handle key) const {
    const char* wanted = key_at(key);
    size_t place = hash_of(key) & mask_;
    int32_t row;
    while ((row = rows_[place]) != kEmpty && std::memcmp(stored(row), wanted, kKeyBytes) != 0)
      place = (place + 1) & mask_;
    return row;
  }

  /// Rebinds a bound row to a key that is not in the table.
  void replace(int32_t row, nb::handle key) {
    const char* wanted = key_at(key);
    size_t hole = home_of(row);
    for (size_t looked = 0; rows_[hole] != row; hole = (hole + 1) & mask_)
      if (looked++ > mask_) throw std::invalid_argument("the row is not bound");
    for (size_t place = (hole + 1) & mask_; rows_[place] != kEmpty; place = (place + 1) & mask_) {
      // An entry moves into the hole unless its home lies between the hole and itself.
      if (((place - home_of(rows_[place])) & mask_) >= ((place - hole) & mask_)) {
        rows_[hole] = rows_[place];
        hole = place;
      }
    }
    rows_[hole] = kEmpty;
    size_t place = hash_of(key) & mask_;
    while (rows_[place] != kEmpty) place = (place + 1) & mask_;
    rows_[place] = row;
    std::memcpy(stored(row), wanted, kKeyBytes);
  }

 private:
  char* stored(int32_t row) const {
    const Py_ssize_t start = Py_ssize_t{row} * kKeyBytes;
    if (row < 0 || start + kKeyBytes > keys_memory_.size())
      throw std::out_of_range("a row is beyond the keys");
    return keys_memory_.data() + start;
  }

  size_t home_of(int32_t row) const {
    const nb::object key = nb::steal(PyBytes_FromStringAndSize(stored(row), kKeyBytes));
    if (!key.is_valid()) throw nb::python_error();
    return hash_of(key) & mask_;
  }

  Memory rows_memory_;
  Memory keys_memory_;
  int32_t* rows_;
  size_t mask_;
};

nb::list find_all(nb::list keys, nb::handle rows, nb::handle stored) {
  const Table table(rows, stored);
  nb::list found;
  for (const nb::handle key : keys) found.append(table.find(key));
  return found;
}

void replace_all(nb::list bound, nb::list keys, nb::handle rows, nb::handle stored) {
  if (bound.size() != keys.size())
    throw std::invalid_argument("bound and keys must have one length");
  Table table(rows, stored);
  for (size_t i = 0; i < keys.size(); ++i) table.replace(nb::cast<int32_t>(bound[i]), keys[i]);
}

}  // namespace

void bind_index(nb::module_& module) {
  module.def("find_all", &find_all, nb::arg("keys"), nb::arg("rows"), nb::arg("stored"),
             "Rows of keys in a KeyTable's columns, -1 where there is none.");
  module.def("replace_all", &replace_all, nb::arg("bound"), nb::arg("keys"), nb::arg("rows"),
             nb::arg("stored"), "Binds bound rows of a KeyTable to keys that are not in it.");
}

}  // namespace kvtier::bind
