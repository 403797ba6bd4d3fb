// Index arrays of the GPT data set and of blends. Each function has a NumPy
// twin in index_arrays.py that gives the same arrays; these are the fast ones.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Rows (index into doc_idx, offset in that document) of stream positions
// 0, S, 2S, .. num_samples * S, in a stream that concatenates the documents.
template <typename Out>
py::array_t<Out> sample_rows(const Array<int32_t>& sizes, const Array<int32_t>& doc_idx,
                             int64_t seq_length, int64_t num_samples) {
  if (sizes.ndim() != 1 || doc_idx.ndim() != 1)
    throw std::invalid_argument("sizes and doc_idx must be one-dimensional");
  if (seq_length < 1 || num_samples < 0)
    throw std::invalid_argument("seq_length must be positive and num_samples not negative");
  py::array_t<Out> rows(std::vector<py::ssize_t>{num_samples + 1, 2});
  const int32_t* size_of = sizes.data();
  const int32_t* order = doc_idx.data();
  const int64_t known = sizes.size(), documents = doc_idx.size();
  Out* out = rows.mutable_data();
  {
    py::gil_scoped_release release;
    int64_t index = -1, begin = 0, end = 0;  // document at hand covers [begin, end)
    for (int64_t sample = 0; sample <= num_samples; ++sample) {
      const int64_t position = sample * seq_length;
      while (position >= end) {
        if (++index >= documents)
          throw std::invalid_argument("the documents hold too few tokens for that many samples");
        const int64_t document = order[index];
        if (document < 0 || document >= known)
          throw std::invalid_argument("doc_idx names a document that has no size");
        begin = end;
        end += size_of[document];
      }
      *out++ = static_cast<Out>(index);
      *out++ = static_cast<Out>(position - begin);
    }
  }
  return rows;
}

py::array build_sample_idx(const Array<int32_t>& sizes, const Array<int32_t>& doc_idx,
                           int64_t seq_length, int64_t num_samples, bool wide) {
  if (wide) return sample_rows<int64_t>(sizes, doc_idx, seq_length, num_samples);
  return sample_rows<int32_t>(sizes, doc_idx, seq_length, num_samples);
}

// For each global sample: the data set furthest behind its weight, and how many
// samples were taken from that set before.
std::pair<py::array_t<uint16_t>, py::array_t<int64_t>> build_blending_indices(
    const Array<double>& weights, int64_t length) {
  const int64_t sets = weights.size();
  if (weights.ndim() != 1 || sets < 1 || sets > 65535 || length < 0)
    throw std::invalid_argument("expected 1 .. 65535 weights and a length that is not negative");
  py::array_t<uint16_t> which(length);
  py::array_t<int64_t> local(length);
  const double* weight = weights.data();
  uint16_t* which_out = which.mutable_data();
  int64_t* local_out = local.mutable_data();
  {
    py::gil_scoped_release release;
    std::vector<int64_t> taken(static_cast<size_t>(sets), 0);
    for (int64_t sample = 0; sample < length; ++sample) {
      const double reached = sample > 0 ? static_cast<double>(sample) : 1.0;
      int64_t best = -1;
      double best_lag = 0.0;
      for (int64_t k = 0; k < sets; ++k) {
        if (weight[k] == 0.0) continue;
        // volatile: a fused multiply-add would round otherwise than NumPy does
        const volatile double due = weight[k] * reached;
        const double lag = due - static_cast<double>(taken[static_cast<size_t>(k)]);
        if (best < 0 || lag > best_lag) {
          best = k;
          best_lag = lag;
        }
      }
      if (best < 0) throw std::invalid_argument("every weight is zero");
      which_out[sample] = static_cast<uint16_t>(best);
      local_out[sample] = taken[static_cast<size_t>(best)]++;
    }
  }
  return {which, local};
}

PYBIND11_MODULE(helpers, module) {
  module.doc() = "Fast builders of index arrays; megatron.data.index_arrays explains them.";
  module.def("build_sample_idx", &build_sample_idx, py::arg("sizes"), py::arg("doc_idx"),
             py::arg("seq_length"), py::arg("num_samples"), py::arg("wide"));
  module.def("build_blending_indices", &build_blending_indices, py::arg("weights"), py::arg("length"));
}
