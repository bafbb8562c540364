// csrc/cpu/distill.h: divergence of a student's distribution p from a teacher's q, a row at a time, and its gradient in the
// student's logits. A row's two sets of exponentials stay in the thread's scratch, so that no later sweep takes one again.
// Whole rows are dealt out to threads: a row's bits depend on nothing else.
#pragma once
#include <omp.h>

#include <type_traits>

#include "gradient.h"
#include "row_pass.h"

namespace fusedpg::FUSEDPG_ISA {

enum class DivergenceKind : int { reverse = 0, forward = 1, jsd = 2 };

/// Below this a probability adds nothing to a divergence, and its logarithm is not asked for.
template <class F>
constexpr F NO_PROBABILITY = sizeof(F) == 4 ? F(1e-30) : F(1e-290);

// ------------------------------------------------------------------ storage, behind function pointers

/// n values as the compute type, padded with -inf to a multiple of GROUP; the row's own memory where nothing is to do.
template <class S, class F>
const F* load_block(const void* data, int64_t begin, int64_t n, F* buffer) {
  constexpr int W = Vector<F>::width;
  const S* x = static_cast<const S*>(data) + begin;
  if constexpr (std::is_same<S, F>::value) {
    if (n % GROUP == 0) return x;
  }
  int64_t i = 0;
  if constexpr (std::is_same<typename Compute<S>::type, F>::value) {
    for (; i + W <= n; i += W) store(buffer + i, load(x + i));
  }
  for (; i < n; ++i) buffer[i] = static_cast<F>(load_one(x + i));
  for (const int64_t padded = blocks_of(n, GROUP) * GROUP; i < padded; ++i) buffer[i] = -static_cast<F>(INFINITY);
  return buffer;
}

/// n values of a gradient to storage; `streamed` ones bypass the cache and are finite.
template <class S, class F>
void store_block(const F* g, int64_t n, bool streamed, void* data, int64_t begin) {
  constexpr int W = Vector<F>::width;
  S* out = static_cast<S*>(data) + begin;
  if (streamed) return scale_block<true>(g, F(1), out, n);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(g + i));
  for (; i < n; ++i) store_one(out + i, g[i]);
}

template <class F>
struct Storage {
  const F* (*load_student)(const void*, int64_t, int64_t, F*);
  const F* (*load_teacher)(const void*, int64_t, int64_t, F*);
  void (*store)(const F*, int64_t, bool, void*, int64_t);
  size_t student_bytes, teacher_bytes;
};

// ------------------------------------------------------------------ statistics of one row

/// Of one distribution over a block: the largest logit, sum of e = exp((x - max)*k), and of e times its exponent.
template <class F>
struct Side {
  F max;
  double sum, weighted;
  FPG_MEMBER bool empty() const { return max == -static_cast<F>(INFINITY); }
  FPG_MEMBER F base() const { return empty() ? F(0) : max; }  // what may be subtracted
};

/// `cross`: sum over the first distribution of its exponential times (its exponent less the other's).
template <class F>
struct PairPartial {
  Side<F> student, teacher;
  double cross;
};

/// Exponentials of a block go to es and et where KEEP. A block with NaN or +inf leaves NaN, and no exponentials.
template <DivergenceKind KIND, bool KEEP, class F>
FPG_FN PairPartial<F> pair_partial(const F* x, const F* y, int64_t n, F ks, F kt, F* es, F* et) {
  using V = typename Vector<F>::type;
  constexpr int W = Vector<F>::width, COUNT = 2;
  const F inf = static_cast<F>(INFINITY), nan = static_cast<F>(NAN);
  PairPartial<F> r{{block_max<F, F>(x, n), 0, 0}, {block_max<F, F>(y, n), 0, 0}, 0};
  if (!(r.student.max < inf) || !(r.teacher.max < inf)) return {{nan, NAN, NAN}, {nan, NAN, NAN}, NAN};
  const F ms = r.student.base(), mt = r.teacher.base();
  V sum_s[COUNT], sum_t[COUNT], weighted_s[COUNT], weighted_t[COUNT], cross[COUNT];
  FPG_UNROLL for (int j = 0; j < COUNT; ++j) sum_s[j] = sum_t[j] = weighted_s[j] = weighted_t[j] = cross[j] = V(0);
  for (int64_t i = 0; i < n; i += COUNT * W) {
    FPG_UNROLL for (int j = 0; j < COUNT; ++j) {
      const int64_t at = i + j * W;
      const V ts = (load(x + at) - V(ms)) * V(ks), tt = (load(y + at) - V(mt)) * V(kt);
      const V s = exp_of_exponent(ts), t = exp_of_exponent(tt);
      if (KEEP) {
        store(es + at, s);
        if (KIND != DivergenceKind::reverse) store(et + at, t);
      }
      sum_s[j] = sum_s[j] + s;
      sum_t[j] = sum_t[j] + t;
      weighted_s[j] = fma(s, max_or_second(ts, V(EXPONENT_FLOOR<F>)), weighted_s[j]);
      weighted_t[j] = fma(t, max_or_second(tt, V(EXPONENT_FLOOR<F>)), weighted_t[j]);
      if (KIND != DivergenceKind::jsd) {
        // a column that the first distribution excludes adds 0; one that only the second excludes adds inf
        const V none = V(-inf), first = KIND == DivergenceKind::forward ? tt : ts,
                second = KIND == DivergenceKind::forward ? ts : tt;
        const V term = (KIND == DivergenceKind::forward ? t : s) * (first - second);
        cross[j] = cross[j] + select(first == none, V(0), select(second == none, V(inf), term));
      }
    }
  }
  r.student.sum = lane_sum(sum_s[0] + sum_s[1]);
  r.teacher.sum = lane_sum(sum_t[0] + sum_t[1]);
  r.student.weighted = lane_sum(weighted_s[0] + weighted_s[1]) * UNIT_IN_DOUBLE<F>;
  r.teacher.weighted = lane_sum(weighted_t[0] + weighted_t[1]) * UNIT_IN_DOUBLE<F>;
  r.cross = lane_sum(cross[0] + cross[1]) * UNIT_IN_DOUBLE<F>;
  return r;
}

/// One distribution over the row, in double.
struct SideStats {
  double max, sum, log_sum, entropy, k;
  /// log p = (a logit's exponent in its block) + shift, and p = (its exponential) * scale.
  template <class F>
  FPG_MEMBER double shift(const Side<F>& block) const {
    return (static_cast<double>(block.base()) - max) * k - log_sum;
  }
  template <class F>
  FPG_MEMBER double scale(const Side<F>& block) const {
    return block.empty() ? 0.0 : ::exp(shift(block));
  }
};

template <class F>
FPG_FN SideStats join(const PairPartial<F>* partials, int64_t blocks, Side<F> PairPartial<F>::* side, double k) {
  SideStats s{-INFINITY, 0, 0, 0, k};
  bool nan = false;
  for (int64_t b = 0; b < blocks; ++b) {
    const double m = static_cast<double>((partials[b].*side).max);
    nan |= m != m;
    s.max = m > s.max ? m : s.max;
  }
  double weighted = 0;
  if (nan || s.max == -INFINITY) s.max = s.sum = NAN;
  for (int64_t b = 0; b < blocks; ++b) {
    const Side<F>& part = partials[b].*side;
    if (part.empty()) continue;
    const double dz = (static_cast<double>(part.max) - s.max) * k, w = ::exp(dz);
    s.sum += w * part.sum;
    if (!(w == 0)) weighted += w * (part.weighted + part.sum * dz);
  }
  s.log_sum = ::log(s.sum);
  s.entropy = s.log_sum - weighted / s.sum;
  return s;
}

// ------------------------------------------------------------------ the pass

template <class F, DivergenceKind KIND>
class DistillPass {
  using V = typename Vector<F>::type;
  static constexpr int W = Vector<F>::width;

 public:
  DistillPass(const Storage<F>& storage, const Matrix& student, const Matrix& teacher, const Divergence& d,
              const DivergenceOut& out, const Matrix& gradient)
      : storage_(storage), student_(student), teacher_(teacher), d_(d), gradient_(gradient) {
    value_ = static_cast<F*>(out.per_token);
    entropy_s_ = static_cast<F*>(out.student_entropy);
    entropy_t_ = static_cast<F*>(out.teacher_entropy);
    blocks_ = blocks_of(student.vocab, BLOCK);
    columns_ = blocks_of(student.vocab, GROUP) * GROUP;
    keep_ = gradient.data != nullptr;
    const int64_t bytes = student.rows() * student.vocab * static_cast<int64_t>(storage.student_bytes);
    stream_ = keep_ && bytes >= STREAM_BYTES;
    ks_ = 1.0 / d.temperature;
    kt_ = 1.0 / d.teacher_temperature;
  }

  void run(int threads) {
    const int64_t rows = student_.rows(), chunk = larger(1, 65536 / larger(1, student_.vocab));
#pragma omp parallel num_threads(threads)
    {
      const FlushDenormals flush;
      const Workspace w = workspace();
#pragma omp for schedule(dynamic, chunk)
      for (int64_t row = 0; row < rows; ++row) one_row(row, w);
      store_fence();
    }
  }

 private:
  /// Of a thread: exponentials of the row, partials of its blocks, and room for a block of each matrix and the gradient.
  struct Workspace {
    F *es, *et;
    PairPartial<F>* partials;
    F *x, *y, *g;
  };
  struct Row {
    const char *x, *y;
    SideStats s, t;
    double value, mean, coefficient;  // mean: of the gradient's log-ratio under p
  };

  Workspace workspace() const {
    const size_t columns = static_cast<size_t>(keep_ || KIND == DivergenceKind::jsd ? columns_ : GROUP),
                 sides = KIND == DivergenceKind::reverse ? 1 : 2;
    const size_t blocks = static_cast<size_t>(larger(blocks_, 1));
    F* exps = static_cast<F*>(thread_scratch(Slot::exponentials, sides * columns * sizeof(F)));
    F* block = static_cast<F*>(thread_scratch(Slot::block, 3 * BLOCK * sizeof(F)));
    return {exps,
            exps + (sides - 1) * columns,
            static_cast<PairPartial<F>*>(thread_scratch(Slot::partials, blocks * sizeof(PairPartial<F>))),
            block,
            block + BLOCK,
            block + 2 * BLOCK};
  }
  int64_t size(int64_t b) const { return smaller(BLOCK, student_.vocab - b * BLOCK); }
  const F* student(const Row& r, int64_t b, F* buffer) const { return storage_.load_student(r.x, b * BLOCK, size(b), buffer); }
  const F* teacher(const Row& r, int64_t b, F* buffer) const { return storage_.load_teacher(r.y, b * BLOCK, size(b), buffer); }
  F in_loop(double k) const { return static_cast<F>(k / UNIT_IN_DOUBLE<F>); }

  void one_row(int64_t row, const Workspace& w) {
    const F weight = static_cast<const F*>(d_.w)[row];
    if (weight == F(0)) {
      value_[row] = entropy_s_[row] = entropy_t_[row] = F(0);
      return zero(row);
    }
    Row r{};
    r.x = static_cast<const char*>(student_.data) + student_.offset(row) * static_cast<int64_t>(storage_.student_bytes);
    r.y = static_cast<const char*>(teacher_.data) + teacher_.offset(row) * static_cast<int64_t>(storage_.teacher_bytes);
    r.coefficient = static_cast<double>(weight) * d_.scale;
    for (int64_t b = 0; b < blocks_; ++b) statistics(r, b, w);
    finish(r, w);
    value_[row] = static_cast<F>(r.value);
    entropy_s_[row] = static_cast<F>(r.s.entropy);
    entropy_t_[row] = static_cast<F>(r.t.entropy);
    if (!keep_) return;
    if (r.coefficient == 0) return zero(row);
    char* out = gradient(row);
    for (int64_t b = blocks_ - 1; b >= 0; --b) write(r, b, w, out);
  }

  char* gradient(int64_t row) const {
    return static_cast<char*>(gradient_.data) + gradient_.offset(row) * static_cast<int64_t>(storage_.student_bytes);
  }
  void zero(int64_t row) const {
    if (keep_) __builtin_memset(gradient(row), 0, static_cast<size_t>(student_.vocab) * storage_.student_bytes);
  }

  __attribute__((noinline)) void statistics(const Row& r, int64_t b, const Workspace& w) const {
    const int64_t padded = blocks_of(size(b), GROUP) * GROUP, at = b * BLOCK;
    const F *x = student(r, b, w.x), *y = teacher(r, b, w.y), ks = in_loop(ks_), kt = in_loop(kt_);
    w.partials[b] = keep_ || KIND == DivergenceKind::jsd ? pair_partial<KIND, true>(x, y, padded, ks, kt, w.es + at, w.et + at)
                                                         : pair_partial<KIND, false>(x, y, padded, ks, kt, w.es, w.et);
  }

  __attribute__((noinline)) void finish(Row& r, const Workspace& w) const {
    r.s = join(w.partials, blocks_, &PairPartial<F>::student, ks_);
    r.t = join(w.partials, blocks_, &PairPartial<F>::teacher, kt_);
    r.value = r.mean = 0;
    const bool broken = r.s.sum != r.s.sum || r.t.sum != r.t.sum;
    if (broken) {
      r.value = r.mean = NAN;
    } else if (KIND == DivergenceKind::jsd) {
      for (int64_t b = 0; b < blocks_; ++b) mixture(r, b, w);
    } else {
      r.value = r.mean = kl(r, w);
    }
  }

  /// KL of the first distribution from the second: its mean of log(first / second).
  double kl(const Row& r, const Workspace& w) const {
    double total = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      const PairPartial<F>& p = w.partials[b];
      const Side<F>& first = KIND == DivergenceKind::forward ? p.teacher : p.student;
      if (first.empty()) continue;
      const double shift = r.t.shift(p.teacher) - r.s.shift(p.student);
      if (p.cross > 1e300) return INFINITY;
      const SideStats& mine = KIND == DivergenceKind::forward ? r.t : r.s;
      total += mine.scale(first) * (p.cross + first.sum * (KIND == DivergenceKind::forward ? shift : -shift));
    }
    return total;
  }

  /// Adds a block's part of the generalised Jensen-Shannon divergence; log(p / m) takes the place of the teacher's
  /// exponentials.
  __attribute__((noinline)) void mixture(Row& r, int64_t b, const Workspace& w) const {
    const int64_t padded = blocks_of(size(b), GROUP) * GROUP, at = b * BLOCK;
    const F *x = student(r, b, w.x), *y = teacher(r, b, w.y);
    const Side<F>&s = w.partials[b].student, &t = w.partials[b].teacher;
    const V ks = V(in_loop(ks_)), kt = V(in_loop(kt_)), ms = V(s.base()), mt = V(t.base()), tiny = V(NO_PROBABILITY<F>);
    const V ps = V(static_cast<F>(r.s.scale(s))), pt = V(static_cast<F>(r.t.scale(t)));
    const V shift_s = V(static_cast<F>(r.s.shift(s))), shift_t = V(static_cast<F>(r.t.shift(t)));
    const V beta = V(static_cast<F>(d_.beta)), other = V(static_cast<F>(1.0 - d_.beta)), unit = V(EXPONENT_UNIT<F>);
    V student_part = V(0), teacher_part = V(0);
    for (int64_t i = 0; i < padded; i += W) {
      const V p = load(w.es + at + i) * ps, q = load(w.et + at + i) * pt;
      const V log_m = log_any(fma(beta, q, other * p));
      const V log_p = fma((load(x + i) - ms) * ks, unit, shift_s), log_q = fma((load(y + i) - mt) * kt, unit, shift_t);
      const V ratio = select(p < tiny, V(0), log_p - log_m);
      student_part = fma(p, ratio, student_part);
      teacher_part = fma(q, select(q < tiny, V(0), log_q - log_m), teacher_part);
      store(w.et + at + i, ratio);
    }
    const double mean = lane_sum(student_part);
    r.mean += mean;
    r.value += (1.0 - d_.beta) * mean + d_.beta * lane_sum(teacher_part);
  }

  /// The gradient of block b, from the exponentials alone except for reverse KL, which reads the logits again.
  __attribute__((noinline)) void write(const Row& r, int64_t b, const Workspace& w, char* out) const {
    const int64_t padded = blocks_of(size(b), GROUP) * GROUP, at = b * BLOCK;
    const Side<F>&s = w.partials[b].student, &t = w.partials[b].teacher;
    const double c = r.coefficient * ks_, per_student = c * r.s.scale(s);
    if (r.mean != r.mean) {
      for (int64_t i = 0; i < padded; ++i) w.g[i] = static_cast<F>(NAN);
    } else if (KIND == DivergenceKind::forward) {
      const V a = V(static_cast<F>(per_student)), b_t = V(static_cast<F>(-c * r.t.scale(t)));
      for (int64_t i = 0; i < padded; i += W) store(w.g + i, fma(load(w.es + at + i), a, load(w.et + at + i) * b_t));
    } else if (KIND == DivergenceKind::jsd) {
      const V a = V(static_cast<F>((1.0 - d_.beta) * per_student)), mean = V(static_cast<F>(r.mean));
      for (int64_t i = 0; i < padded; i += W) store(w.g + i, load(w.es + at + i) * (a * (load(w.et + at + i) - mean)));
    } else {
      const F *x = student(r, b, w.x), *y = teacher(r, b, w.y);
      const double shift = r.s.shift(s) - r.t.shift(t) - r.mean;
      const V high = V(static_cast<F>(shift)),
              low = V(r.mean < INFINITY ? static_cast<F>(shift - static_cast<double>(static_cast<F>(shift))) : F(0));
      const V a = V(static_cast<F>(per_student)), unit = V(EXPONENT_UNIT<F>), ms = V(s.base()), mt = V(t.base());
      const V ks = V(in_loop(ks_)), kt = V(in_loop(kt_));
      for (int64_t i = 0; i < padded; i += W) {
        const V e = load(w.es + at + i), ratio = (load(x + i) - ms) * ks - (load(y + i) - mt) * kt;
        const V g = e * (a * (fma(ratio, unit, high) + low));
        store(w.g + i, select(e == V(0), V(0), g));
      }
    }
    const bool finite = r.mean - r.mean == 0 && r.coefficient - r.coefficient == 0;
    storage_.store(w.g, size(b), stream_ && finite, out, b * BLOCK);
  }

  const Storage<F>& storage_;
  const Matrix &student_, &teacher_;
  const Divergence& d_;
  const Matrix& gradient_;
  F *value_, *entropy_s_, *entropy_t_;
  int64_t blocks_, columns_;
  bool keep_, stream_;
  double ks_, kt_;
};

template <class F>
void distill_as(int threads, const Storage<F>& storage, const Matrix& student, const Matrix& teacher, const Divergence& d,
                const DivergenceOut& out, const Matrix& gradient) {
  switch (static_cast<DivergenceKind>(d.kind)) {
    case DivergenceKind::reverse:
      return DistillPass<F, DivergenceKind::reverse>(storage, student, teacher, d, out, gradient).run(threads);
    case DivergenceKind::forward:
      return DistillPass<F, DivergenceKind::forward>(storage, student, teacher, d, out, gradient).run(threads);
    case DivergenceKind::jsd:
      return DistillPass<F, DivergenceKind::jsd>(storage, student, teacher, d, out, gradient).run(threads);
  }
}

}  // namespace fusedpg::FUSEDPG_ISA
