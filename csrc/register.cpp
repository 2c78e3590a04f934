// Schemas of the operations, and the module whose import loads them.
#include <Python.h>
#include <torch/library.h>
#include <torch/version.h>

#include "brgemm.h"
#include "inner.h"

// Defined by a file that setup.py writes: a hash of csrc/, so that an extension older than its sources is noticed.
extern const char* const diffscore_sources;

TORCH_LIBRARY(diffscore_fast, m) {
  m.def(
      "masked_logprob(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? rows, int[] excluded_ids, "
      "int vocab_size, float logit_scale, float? soft_cap, Tensor? weight_scale, str products) -> "
      "(Tensor, Tensor)");
  m.def(
      "masked_logprob_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? rows, "
      "int[] excluded_ids, int vocab_size, float logit_scale, float? soft_cap, Tensor? weight_scale, str products) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "prefix_attention(Tensor query, Tensor key, Tensor value, Tensor prefix_key, Tensor prefix_value, "
      "Tensor key_offsets, Tensor query_offsets, Tensor prefix_starts, Tensor prefix_lengths, Tensor? query_places, "
      "int block, str products) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual, Tensor? gain, Tensor? offset, "
      "float epsilon) -> Tensor");
  m.def("pack_weight(Tensor weight, bool gated) -> Tensor");
  m.def(
      "linear_packed(Tensor x, Tensor packed, int width, Tensor? bias, str activation, Tensor? residual, Tensor? gain, "
      "Tensor? offset, float epsilon, str products) -> Tensor");
  m.def("log_mean_exp(Tensor values, Tensor segments) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("evidence_bounds(Tensor log_p, int folds, Tensor segments) -> (Tensor, Tensor, Tensor)");
}

static PyObject* instruction_set(PyObject*, PyObject*) {
  return PyUnicode_FromString(diffscore::inner_kernels().name);
}

static PyObject* sources(PyObject*, PyObject*) {
  return PyUnicode_FromString(diffscore_sources);
}

static PyObject* torch_version(PyObject*, PyObject*) {
  return PyUnicode_FromString(TORCH_VERSION);
}

static PyObject* brgemm_unavailable(PyObject*, PyObject* type) {
  const char* text = PyUnicode_AsUTF8(type);
  if (text == nullptr) return nullptr;
  const std::string name = text;
  const std::string reason = name == "bfloat16"  ? diffscore::brgemm_unavailable(at::kBFloat16)
                             : name == "float32" ? diffscore::brgemm_unavailable(at::kFloat)
                                                 : "brgemm multiplies float32 and bfloat16 here, not " + name;
  if (reason.empty()) Py_RETURN_NONE;
  return PyUnicode_FromString(reason.c_str());
}

static PyObject* generated_code_unavailable(PyObject*, PyObject*) {
  const std::string& reason = diffscore::generated_code_unavailable();
  if (reason.empty()) Py_RETURN_NONE;
  return PyUnicode_FromString(reason.c_str());
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyMethodDef methods[] = {
      {"instruction_set", instruction_set, METH_NOARGS, "Name of the inner loops this processor runs."},
      {"brgemm_unavailable", brgemm_unavailable, METH_O,
       "None where products of \"float32\" or \"bfloat16\" can go through oneDNN's brgemm, else why not."},
      {"generated_code_unavailable", generated_code_unavailable, METH_NOARGS,
       "None where the system lets a process write machine code and run it, else why not."},
      {"sources", sources, METH_NOARGS, "Hash of the sources that this module was built from."},
      {"torch_version", torch_version, METH_NOARGS, "Version of torch that this module was built against."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
