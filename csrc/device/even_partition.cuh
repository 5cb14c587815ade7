// Even partition of indivisible items among blocks.
#pragma once

namespace cutlass_ops {

// `whole` items over `parts`, as equal as possible: part i has base + (i < rest) of them.
struct EvenPartition {
  int base, rest;
  __host__ __device__ EvenPartition(int whole, int parts)
      : base(whole / parts), rest(whole % parts) {}
  __device__ __forceinline__ int first(int i) const { return base * i + min(i, rest); }
  __device__ __forceinline__ int count(int i) const { return base + (i < rest); }
};

}  // namespace cutlass_ops
