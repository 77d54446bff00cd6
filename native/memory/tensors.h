// What torch tensors hold, read through their Python attributes and the address of their memory: no header of torch, no operator of torch.
//
// A step looks at some dozens of tensors a dozen times; in Python each look at one took as long as hashing it. Only plain tensors are read here:
// `torch.Tensor` or `torch.nn.Parameter` itself, dense, on the CPU, with storage behind every element. Of any other the answer says so, and
// Python decides (`instrument/observe/content.py`), so a rule of what may be read is never less strict here than there.
//
// The caller keeps TorchFunctionModes off. GIL: needed; released while many bytes are hashed. Threads: no state after construction.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "memory/fingerprint.h"

namespace proctor {

// Where the content of a plain tensor lies. Valid while somebody holds the tensor.
struct Memory {
  std::uint64_t address = 0, elements = 0;
  int width = 0;
  Kind kind = Kind::kRaw;
};

class Tensors {
 public:
  Tensors(pybind11::type tensor, pybind11::type parameter, pybind11::object strided, pybind11::dict formats, pybind11::type summary);

  // The memory of a plain tensor, nothing for any other. An error that an attribute raises means that it is not plain.
  std::optional<Memory> memory_of(PyObject* tensor) const;
  // Fingerprint, norm and flags of each; without the GIL where there are many bytes.
  static std::vector<Summary> read(const std::vector<Memory>& places);

  // A summary for each tensor, None for one that is not plain.
  pybind11::list summaries(const pybind11::list& tensors) const;
  // The number in a plain tensor without dimensions; None for a plain one with dimensions, NotImplemented for any other.
  pybind11::object number(const pybind11::object& tensor) const;
  // A hash of `size` bytes at each of sixteen places, evenly spread, of a plain tensor that has as many; None of any other.
  pybind11::object spots(const pybind11::object& tensor, std::uint64_t size) const;

 private:
  bool ours(PyObject* object) const;
  std::optional<Memory> read_memory(PyObject* tensor) const;
  pybind11::object made(const Summary& summary) const;

  pybind11::object tensor_, parameter_, strided_, summary_;
  std::vector<std::tuple<pybind11::object, int, Kind>> formats_;
};

void bind_tensors(pybind11::module_& m);

}  // namespace proctor

using proctor::bind_tensors;
