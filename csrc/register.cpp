// Schemas of the operations, and the module whose import loads them.
#include <Python.h>
#include <torch/library.h>

#include "inner.h"

TORCH_LIBRARY(diffscore_fast, m) {
  m.def(
      "masked_logprob(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? rows, int[] excluded_ids, "
      "int vocab_size, float logit_scale, float? soft_cap, Tensor? weight_scale) -> (Tensor, Tensor)");
  m.def(
      "masked_logprob_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? rows, "
      "int[] excluded_ids, int vocab_size, float logit_scale, float? soft_cap, Tensor? weight_scale) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "prefix_attention(Tensor query, Tensor key, Tensor value, Tensor prefix_key, Tensor prefix_value, "
      "Tensor key_offsets, Tensor query_offsets, Tensor prefix_starts, Tensor prefix_lengths, Tensor? query_places, "
      "int block) -> Tensor");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual, Tensor? gain, Tensor? offset, "
      "float epsilon) -> Tensor");
  m.def("log_mean_exp(Tensor values, Tensor segments) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("evidence_bounds(Tensor log_p, int folds, Tensor segments) -> (Tensor, Tensor, Tensor)");
}

static PyObject* instruction_set(PyObject*, PyObject*) {
  return PyUnicode_FromString(diffscore::inner_kernels().name);
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyMethodDef methods[] = {
      {"instruction_set", instruction_set, METH_NOARGS, "Name of the inner loops this processor runs."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
