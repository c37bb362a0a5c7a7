// Recurrences token by token: what a decoding step does, and what keeps results the same at any chunking.
#pragma once

#include "kernels/recurrent/scan.h"

namespace ridgeline::RIDGELINE_LEVEL::recurrent {

inline constexpr float kNormEps = 1e-6f;  // of the delta rule's queries and keys

// Values [begin, end) of one head, in blocks of Recurrence::kBlock but for the head's last one.
struct HeadPart {
  int64_t head, begin, end;

  int64_t width() const { return end - begin; }
};

RL_INLINE int64_t key_head(const Recurrence& r, int64_t head) { return head / (r.heads / r.key_heads); }

// What the recurrence is for one token of a head: its state shrinks by `decay`, and what it gains is scaled by `weight`.
struct Gates {
  float decay, weight;
};

// Of `count` <= kLanes tokens of a head, from row `first`.
RL_INLINE void make_gates(const Recurrence& r, const RecurrenceRows& rows, int64_t first, int64_t count, int64_t head,
                          float* decay, float* weight) {
  if (r.kind == RecurrenceKind::retention) {
    store_first(decay, exp(splat(r.rate[head])), count);
    return store_first(weight, splat(1.0f), count);
  }
  alignas(64) float dt[kLanes] = {}, beta[kLanes] = {};
  for (int64_t t = 0; t < count; t++) {
    dt[t] = rows.dt.row(first + t)[head];
    if (r.kind == RecurrenceKind::delta) beta[t] = rows.beta.row(first + t)[head];
  }
  Floats step = softplus(load<Floats>(dt) + r.dt_bias[head]);
  if (r.kind == RecurrenceKind::ssd) {
    step = step < r.dt_min ? splat(r.dt_min) : step;  // keeps a NaN
    step = step > r.dt_max ? splat(r.dt_max) : step;
  }
  store_first(decay, exp(step * r.rate[head]), count);
  store_first(weight, r.kind == RecurrenceKind::ssd ? step : sigmoid(load<Floats>(beta)), count);
}

RL_INLINE float inverse_length(const float* x, int64_t size) {
  Floats squares{};
  for_vectors(size, [&](int64_t i, int64_t count) {
    const Floats v = load_first(x + i, count);
    squares = fma(v, v, squares);
  });
  return 1.0f / square_root(sum(squares) + kNormEps);
}

// By what a token's query and key are multiplied before anything else.
struct KeyScales {
  float q, k;
};

RL_INLINE KeyScales key_scales(const Recurrence& r, const float* q, const float* k) {
  if (r.kind != RecurrenceKind::delta) return {1.0f, 1.0f};
  return {inverse_length(q, r.key_size) / square_root((float)r.key_size), inverse_length(k, r.key_size)};
}

// One token where a row of the state is a value: h <- decay h + (weight v) k, y = h q + skip v.
static inline void step_by_value(const Recurrence& r, const HeadPart& part, float* state, Gates gates, const float* q,
                                 const float* k, const float* v, float* out) {
  const Floats decay = splat(gates.decay), skip = splat(r.skip[part.head]);
  for (int64_t first = part.begin; first < part.end; first += kLanes) {
    const int64_t count = part.end - first;
    Floats products[kLanes] = {};
    for (int64_t i = 0; i < kLanes && i < count; i++) {
      float* row = state + (first + i) * r.key_size;
      const Floats gained = splat(gates.weight * v[first + i]);
      Floats product{};
      for_vectors(r.key_size, [&](int64_t n, int64_t rest) {
        const Floats h = fma(gained, load_first(k + n, rest), decay * load_first(row + n, rest));
        store_first(row + n, h, rest);
        product = fma(h, load_first(q + n, rest), product);
      });
      products[i] = product;
    }
    store_first(out + first, fma(skip, load_first(v + first, count), sums_of(products)), count);
  }
}

// One token where a row of the state is a key: h <- decay h, then h <- h + k u with u = v, or for the delta rule
// weight (v - h^T k); y = h^T q. `Vectors` of the values at `first`, the last of them filled up to `count` in all.
template <int Vectors>
RL_INLINE void step_by_key(const Recurrence& r, float* state, Gates gates, KeyScales scales, const float* q,
                           const float* k, const float* v, int64_t first, int64_t count, float* out) {
  Floats gained[Vectors], y[Vectors] = {};
  for (int i = 0; i < Vectors; i++) gained[i] = load_first(v + first + i * kLanes, count - i * kLanes);
  if (r.kind == RecurrenceKind::delta) {
    Floats held[Vectors] = {};
    for (int64_t n = 0; n < r.key_size; n++)
      for (int i = 0; i < Vectors; i++)
        held[i] = fma(splat(k[n] * scales.k), load_first(state + n * r.value_size + first + i * kLanes, count - i * kLanes),
                      held[i]);
    for (int i = 0; i < Vectors; i++) gained[i] = gates.weight * (gained[i] - gates.decay * held[i]);
  }
  for (int64_t n = 0; n < r.key_size; n++) {
    const Floats key = splat(k[n] * scales.k), query = splat(q[n] * scales.q);
    for (int i = 0; i < Vectors; i++) {
      float* at = state + n * r.value_size + first + i * kLanes;
      const Floats h = fma(key, gained[i], gates.decay * load_first(at, count - i * kLanes));
      store_first(at, h, count - i * kLanes);
      y[i] = fma(query, h, y[i]);
    }
  }
  for (int i = 0; i < Vectors; i++) store_first(out + first + i * kLanes, y[i], count - i * kLanes);
}

// Token `t` of the rows, with the state of the part's head; `out` is the token's row of that head.
static inline void step(const Recurrence& r, const RecurrenceRows& rows, const HeadPart& part, int64_t t, float* state,
                        float* out) {
  const int64_t keys = key_head(r, part.head) * r.key_size, values = part.head * r.value_size;
  const float *q = rows.q.row(t) + keys, *k = rows.k.row(t) + keys, *v = rows.v.row(t) + values;
  Gates gates;
  make_gates(r, rows, t, 1, part.head, &gates.decay, &gates.weight);
  if (r.kind == RecurrenceKind::ssd) return step_by_value(r, part, state, gates, q, k, v, out);
  const KeyScales scales = key_scales(r, q, k);
  constexpr int kWide = 4;
  int64_t first = part.begin;
  for (; first + kWide * kLanes <= part.end; first += kWide * kLanes)
    step_by_key<kWide>(r, state, gates, scales, q, k, v, first, kWide * kLanes, out);
  for (; first < part.end; first += kLanes)
    step_by_key<1>(r, state, gates, scales, q, k, v, first, part.end - first, out);
}

}  // namespace ridgeline::RIDGELINE_LEVEL::recurrent
