// Sixteen bytes at a time on the host, by the compilers' vector extension: SSE2 on x86-64 and NEON
// on AArch64, both of which every such processor has.
#pragma once

#include <cstdint>
#include <cstring>

namespace cutlass_ops {

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint64_t Longs __attribute__((vector_size(16)));

// Elements of a and b, counted through both.
#if defined(__clang__)
#define CUTLASS_OPS_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CUTLASS_OPS_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif

inline Bytes load(void const* from) {
  Bytes v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(void* to, Bytes v) { std::memcpy(to, &v, sizeof v); }

inline Bytes splat(uint8_t byte) { return Bytes{} + byte; }

// a0 b0 a1 b1 ... of the first eight bytes, of the last eight.
inline Bytes zip_low(Bytes a, Bytes b) {
  return CUTLASS_OPS_SHUFFLE(Bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Bytes zip_high(Bytes a, Bytes b) {
  return CUTLASS_OPS_SHUFFLE(Bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                             31);
}

// a0 a2 ... a14 b0 b2 ... b14, and a1 a3 ... a15 b1 b3 ... b15.
inline Bytes even(Bytes a, Bytes b) {
  return CUTLASS_OPS_SHUFFLE(Bytes, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                             30);
}
inline Bytes odd(Bytes a, Bytes b) {
  return CUTLASS_OPS_SHUFFLE(Bytes, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                             31);
}

// v0 v8 v1 v9 ... v7 v15, and back.
inline Bytes zip_halves(Bytes v) {
  Longs const longs = Longs(v);
  return zip_low(v, Bytes(CUTLASS_OPS_SHUFFLE(Longs, longs, longs, 1, 1)));
}
inline Bytes unzip_halves(Bytes v) { return even(v, Bytes(Halves(v) >> 8)); }

// Word j of vector i becomes word i of vector j.
inline void transpose_words(Bytes (&v)[4]) {
  Words const a = Words(v[0]), b = Words(v[1]), c = Words(v[2]), d = Words(v[3]);
  Longs const ab = Longs(CUTLASS_OPS_SHUFFLE(Words, a, b, 0, 4, 1, 5)),
              AB = Longs(CUTLASS_OPS_SHUFFLE(Words, a, b, 2, 6, 3, 7));
  Longs const cd = Longs(CUTLASS_OPS_SHUFFLE(Words, c, d, 0, 4, 1, 5)),
              CD = Longs(CUTLASS_OPS_SHUFFLE(Words, c, d, 2, 6, 3, 7));
  v[0] = Bytes(CUTLASS_OPS_SHUFFLE(Longs, ab, cd, 0, 2));
  v[1] = Bytes(CUTLASS_OPS_SHUFFLE(Longs, ab, cd, 1, 3));
  v[2] = Bytes(CUTLASS_OPS_SHUFFLE(Longs, AB, CD, 0, 2));
  v[3] = Bytes(CUTLASS_OPS_SHUFFLE(Longs, AB, CD, 1, 3));
}

}  // namespace cutlass_ops
