// Recurrences a chunk of tokens at a time: within the chunk matrix products, between chunks the state (arXiv 2405.21060,
// section 6; for the delta rule arXiv 2412.06464, section 3.3, with the triangular system solved by substitution).
//
// Ratios of decays are running products, not differences of sums of logarithms: they keep their digits however much a
// head forgets.
#pragma once

#include "kernels/recurrent/step.h"

namespace ridgeline::RIDGELINE_LEVEL::recurrent {

inline constexpr int64_t kChunk = 64;  // tokens, a multiple of the tile's rows and columns
#if defined(__AVX512F__)
inline constexpr int kTileRows = 8;
#else
inline constexpr int kTileRows = 4;
#endif
inline constexpr int kTileColumns = 2 * kLanes;

RL_INLINE int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// A worker's memory: rows of tokens, as wide as keys or values rounded up to whole vectors of kPanel, zero beyond them.
struct ChunkMemory {
  int64_t keys, values;  // widths
  float *q, *k;          // [kChunk][keys]
  float* k_columns;      // [keys][kChunk]
  float *qk, *kk;        // [kChunk][kChunk]: q . k and k . k of a token and the ones up to it
  float* scores;         // [kChunk][kChunk]: qk weighted for one head
  float* system;         // [kChunk][kChunk]: kk weighted for one head
  float *v, *gained;     // [kChunk][values]
  float* state;          // [keys][values]

  static int64_t floats(const Recurrence& r) {
    const int64_t keys = rounded_up(r.key_size, kPanel), values = rounded_up(r.value_size, kPanel);
    return kChunk * (3 * keys + 4 * kChunk + 2 * values) + keys * values;
  }

  ChunkMemory(const Recurrence& r, float* memory)
      : keys(rounded_up(r.key_size, kPanel)), values(rounded_up(r.value_size, kPanel)) {
    const auto take = [&](int64_t rows, int64_t width) {
      memory += rows * width;
      return memory - rows * width;
    };
    q = take(kChunk, keys), k = take(kChunk, keys), k_columns = take(keys, kChunk);
    qk = take(kChunk, kChunk), kk = take(kChunk, kChunk);
    scores = take(kChunk, kChunk), system = take(kChunk, kChunk);
    v = take(kChunk, values), gained = take(kChunk, values), state = take(keys, values);
  }
};

// A chunk of a span, for the head that is computed.
struct Chunk {
  int64_t first, count;  // rows
  alignas(64) float decay[kChunk], weight[kChunk];
  alignas(64) float prefix[kChunk];  // the product of the decays up to each token, its own included
  alignas(64) float ratio[kChunk];   // what of each token is left at the end of the chunk, times what scales it
};

// kTileRows x kTileColumns sums in registers.
struct Sums {
  Floats at[kTileRows][2] = {};
};

// sums += a b over `steps` products; entry (row, step) of a is at a + row * a_row + step * a_step.
RL_INLINE void add_product(Sums& sums, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step,
                           int64_t steps) {
  for (int64_t s = 0; s < steps; s++) {
    const Floats b0 = load<Floats>(b + s * b_step), b1 = load<Floats>(b + s * b_step + kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; i++) {
      const Floats x = splat(a[i * a_row + s * a_step]);
      sums.at[i][0] = fma(x, b0, sums.at[i][0]);
      sums.at[i][1] = fma(x, b1, sums.at[i][1]);
    }
  }
}

// Calls end(row, column, sum) for every vector of a tile.
template <class End>
RL_INLINE void each_of(const Sums& sums, int64_t row, int64_t column, End end) {
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; i++) {
    end(row + i, column, sums.at[i][0]);
    end(row + i, column + kLanes, sums.at[i][1]);
  }
}

static inline void copy_row(const float* from, int64_t size, float factor, int64_t width, float* to) {
  for (int64_t i = 0; i < width; i += kLanes) store(to + i, size > i ? factor * load_first(from + i, size - i) : Floats{});
}

// [rows][columns] at `from`, `from_row` floats apart, to [columns][rows]; to's rows end in zeros up to whole vectors.
static inline void transpose_matrix(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to,
                                    int64_t to_row) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Floats square[kLanes] = {};
      for (int64_t i = 0; i < kLanes && r + i < rows; i++) square[i] = load_first(from + (r + i) * from_row + c, columns - c);
      transpose(square);
      for (int64_t i = 0; i < kLanes && c + i < columns; i++) store(to + (c + i) * to_row + r, square[i]);
    }
}

// Products of `rows` with the chunk's keys, of each token with the ones up to it.
static inline void multiply_keys(const ChunkMemory& m, int64_t size, int64_t count, const float* rows,
                                 float* products) {
  for (int64_t t = 0; t < count; t += kTileRows)
    for (int64_t s = 0; s < t + kTileRows; s += kTileColumns) {
      Sums sums;
      add_product(sums, rows + t * m.keys, m.keys, 1, m.k_columns + s, kChunk, size);
      each_of(sums, t, s, [&](int64_t row, int64_t column, Floats sum) { store(products + row * kChunk + column, sum); });
    }
}

// What the heads share that have the same keys.
static inline void pack_keys(const Recurrence& r, const RecurrenceRows& rows, const Chunk& chunk, int64_t head,
                             const ChunkMemory& m) {
  for (int64_t t = 0; t < rounded_up(chunk.count, kTileRows); t++) {
    if (t >= chunk.count) {
      copy_row(m.q, 0, 1.0f, m.keys, m.q + t * m.keys), copy_row(m.k, 0, 1.0f, m.keys, m.k + t * m.keys);
      continue;
    }
    const float* q = rows.q.row(chunk.first + t) + head * r.key_size;
    const float* k = rows.k.row(chunk.first + t) + head * r.key_size;
    const KeyScales scales = key_scales(r, q, k);
    copy_row(q, r.key_size, scales.q, m.keys, m.q + t * m.keys);
    copy_row(k, r.key_size, scales.k, m.keys, m.k + t * m.keys);
  }
  transpose_matrix(m.k, m.keys, rounded_up(chunk.count, kTileRows), r.key_size, m.k_columns, kChunk);
  multiply_keys(m, r.key_size, chunk.count, m.q, m.qk);
  if (r.kind == RecurrenceKind::delta) multiply_keys(m, r.key_size, chunk.count, m.k, m.kk);
}

// Gates, and what each token has of the ones up to it: scores = q . k * ratio of decays * weight. The delta rule's
// weight is in its system's matrix, weight (k . k) * ratio: it scales what becomes of a value.
static inline void make_scores(const Recurrence& r, const RecurrenceRows& rows, Chunk& chunk, int64_t head,
                         const ChunkMemory& m) {
  for (int64_t t = 0; t < chunk.count; t += kLanes)
    make_gates(r, rows, chunk.first + t, chunk.count - t < kLanes ? chunk.count - t : kLanes, head, chunk.decay + t,
               chunk.weight + t);
  const bool delta = r.kind == RecurrenceKind::delta;
  for (int64_t s = 0; s < kChunk; s += kLanes) store(chunk.ratio + s, Floats{});
  float prefix = 1.0f;
  for (int64_t t = 0; t < rounded_up(chunk.count, kTileRows); t++) {
    const bool real = t < chunk.count;
    const float decay = real ? chunk.decay[t] : 1.0f;
    chunk.prefix[t] = prefix *= decay;
    for (int64_t s = 0; s < t; s += kLanes) store(chunk.ratio + s, load<Floats>(chunk.ratio + s) * decay);
    if (real) chunk.ratio[t] = delta ? 1.0f : chunk.weight[t];
    for (int64_t s = 0; s < rounded_up(t + 1, kTileRows); s += kLanes) {
      const Floats ratio = load<Floats>(chunk.ratio + s);
      store(m.scores + t * kChunk + s, load<Floats>(m.qk + t * kChunk + s) * ratio);
      if (delta && real) store(m.system + t * kChunk + s, load<Floats>(m.kk + t * kChunk + s) * ratio * chunk.weight[t]);
    }
  }
}

// The part's values, and its state with a row per key.
static inline void pack_values(const Recurrence& r, const RecurrenceRows& rows, const Chunk& chunk,
                               const HeadPart& part, const float* state, const ChunkMemory& m) {
  const int64_t width = rounded_up(part.width(), kTileColumns);
  for (int64_t t = 0; t < rounded_up(chunk.count, kTileRows); t++) {
    const bool real = t < chunk.count;
    const float* v = rows.v.row(chunk.first + (real ? t : 0)) + part.head * r.value_size + part.begin;
    copy_row(v, real ? part.width() : 0, 1.0f, width, m.v + t * m.values);
  }
  if (r.kind == RecurrenceKind::ssd) {
    transpose_matrix(state + part.begin * r.key_size, r.key_size, part.width(), r.key_size, m.state, m.values);
    return;
  }
  for (int64_t n = 0; n < r.key_size; n++)
    copy_row(state + n * r.value_size + part.begin, part.width(), 1.0f, width, m.state + n * m.values);
}

// Replaces v by u, with u_t = weight (v_t - prefix h^T k_t) - the sum over s < t of system[t][s] u_s.
static inline void solve(const Recurrence& r, const Chunk& chunk, int64_t width, const ChunkMemory& m) {
  for (int64_t t = 0; t < chunk.count; t += kTileRows)
    for (int64_t c = 0; c < width; c += kTileColumns) {
      Sums held, earlier;
      add_product(held, m.k + t * m.keys, m.keys, 1, m.state + c, m.values, r.key_size);
      add_product(earlier, m.system + t * kChunk, kChunk, 1, m.v + c, m.values, t);
      for (int i = 0; i < kTileRows && t + i < chunk.count; i++)
        for (int half = 0; half < 2; half++) {
          float* at = m.v + (t + i) * m.values + c + half * kLanes;
          const Floats residual = load<Floats>(at) - chunk.prefix[t + i] * held.at[i][half];
          Floats u = chunk.weight[t + i] * residual - earlier.at[i][half];
          for (int j = 0; j < i; j++)
            u = fma(splat(-m.system[(t + i) * kChunk + t + j]), load<Floats>(at - (i - j) * m.values), u);
          store(at, u);
        }
    }
}

// out = prefix h^T q + scores v + skip v
static inline void read_out(const Recurrence& r, const RecurrenceRows& rows, const Chunk& chunk, const HeadPart& part,
                            const ChunkMemory& m) {
  const float skip = r.kind == RecurrenceKind::ssd ? r.skip[part.head] : 0.0f;
  for (int64_t t = 0; t < chunk.count; t += kTileRows)
    for (int64_t c = 0; c < part.width(); c += kTileColumns) {
      Sums sums;
      add_product(sums, m.q + t * m.keys, m.keys, 1, m.state + c, m.values, r.key_size);
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; i++) sums.at[i][0] *= chunk.prefix[t + i], sums.at[i][1] *= chunk.prefix[t + i];
      add_product(sums, m.scores + t * kChunk, kChunk, 1, m.v + c, m.values, t + kTileRows);
      each_of(sums, t, c, [&](int64_t row, int64_t column, Floats sum) {
        if (row >= chunk.count || column >= part.width()) return;
        float* to = rows.out.row(chunk.first + row) + part.head * r.value_size + part.begin + column;
        if (skip != 0.0f) sum = fma(splat(skip), load<Floats>(m.v + row * m.values + column), sum);
        store_first(to, sum, part.width() - column);
      });
    }
}

// state <- decay of the whole chunk * state + the sum over its tokens of k (ratio v)^T, as the state is laid out.
static inline void update(const Recurrence& r, const Chunk& chunk, const HeadPart& part, float* state,
                          const ChunkMemory& m) {
  const float decay = chunk.prefix[chunk.count - 1];
  for (int64_t t = 0; t < chunk.count; t++)
    for (int64_t c = 0; c < part.width(); c += kLanes)
      store(m.gained + t * m.values + c, load<Floats>(m.v + t * m.values + c) * chunk.ratio[t]);
  const auto add_to = [&](const float* a, int64_t a_step, int64_t num_rows, const float* b, int64_t b_step,
                               int64_t num_columns, float* to, int64_t to_row) {
    for (int64_t row = 0; row < num_rows; row += kTileRows)
      for (int64_t column = 0; column < num_columns; column += kTileColumns) {
        Sums sums;
        add_product(sums, a + row, 1, a_step, b + column, b_step, chunk.count);
        each_of(sums, row, column, [&](int64_t i, int64_t j, Floats sum) {
          if (i >= num_rows || j >= num_columns) return;
          float* at = to + i * to_row + j;
          store_first(at, fma(splat(decay), load_first(at, num_columns - j), sum), num_columns - j);
        });
      }
  };
  if (r.kind == RecurrenceKind::ssd)
    add_to(m.gained, m.values, part.width(), m.k, m.keys, r.key_size, state + part.begin * r.key_size, r.key_size);
  else
    add_to(m.k, m.keys, r.key_size, m.gained, m.values, part.width(), state + part.begin, r.value_size);
}

}  // namespace ridgeline::RIDGELINE_LEVEL::recurrent
