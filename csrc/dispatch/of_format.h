// Which of a kernel's instances a weight takes, by its format.
#pragma once

#include "cutlass_ops/problem.h"

namespace cutlass_ops {

template <class T>
constexpr T of_format(PackedWeight const& w, T int4, T int8, T codebook, T e4m3) {
  return w.book ? codebook : w.e4m3 ? e4m3 : w.bits == 4 ? int4 : int8;
}

// Likewise of functions that are templates of the format.
#define OF_FORMAT(weight, function)                                                                \
  of_format(weight, function<formats::Int4>, function<formats::Int8>, function<formats::Codebook>, \
            function<formats::E4m3>)

}  // namespace cutlass_ops
