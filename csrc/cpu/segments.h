// csrc/cpu/segments.h: sums and weighted means over the sequences of a batch. A sequence is cut into pieces of a fixed number
// of tokens from its own start; pieces are summed in parallel and joined in order, so that one huge sequence and a million tiny
// ones both use every thread, and a sequence's result depends on nothing but its own tokens.
#pragma once
#include "machine.h"
#include "storage.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr int64_t PIECE = 4096;

/// Sums over tokens, in double; a mean is their quotient, a sum leaves the weight alone.
struct WeightedSum {
  double value, weight;
};
enum class Join { mean, sum };

/// What `add` adds for the tokens of [begin, end).
template <class Add>
FPG_FN WeightedSum sum_tokens(const Add& add, int64_t begin, int64_t end) {
  WeightedSum s{0, 0};
  for (int64_t i = begin; i < end; ++i) add(i, s);
  return s;
}

/// The sequences of `cu`, clamped into [0, tokens], and the pieces they are cut into.
class Sequences {
 public:
  Sequences(const int64_t* cu, int64_t sequences, int64_t tokens)
      : cu_(cu), sequences_(sequences), tokens_(tokens), first_piece_(sequences + 1) {
    first_piece_.get()[0] = 0;
    for (int64_t s = 0; s < sequences; ++s) first_piece_.get()[s + 1] = first_piece_.get()[s] + blocks_of(size(s), PIECE);
  }

  /// spread[i] = the mean of value(i) over i's sequence with weights w; tokens without weight are not looked at. 0 where the
  /// weights add up to nothing.
  template <class F, class ValueAt>
  void mean(int threads, const F* w, const ValueAt& value, F* spread) const {
    const auto add = [w, &value](int64_t i, WeightedSum& s) __attribute__((always_inline)) {
      if (w[i] == F(0)) return;
      const double weight = static_cast<double>(w[i]);
      s.value += weight * static_cast<double>(value(i));
      s.weight += weight;
    };
    reduce(threads, Join::mean, add, spread);
  }

  /// spread[i] = what `add(token, sum)` has added, joined over i's sequence.
  template <class F, class Add>
  void reduce(int threads, Join join, const Add& add, F* spread) const {
    const int64_t pieces = first_piece_.get()[sequences_];
    const CallBuffer<WeightedSum> sums(pieces);
    const CallBuffer<double> results(sequences_);
#pragma omp parallel num_threads(threads)
    {
      const FlushDenormals flush;
#pragma omp for schedule(dynamic, 16)
      for (int64_t s = 0; s < sequences_; ++s)
        if (size(s) <= PIECE) results.get()[s] = result(join, sum_tokens(add, begin(s), begin(s) + size(s)));
#pragma omp for schedule(dynamic, 16)
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t s = sequence_of(p), from = begin(s) + (p - first_piece_.get()[s]) * PIECE;
        if (size(s) > PIECE) sums.get()[p] = sum_tokens(add, from, smaller(from + PIECE, begin(s) + size(s)));
      }
#pragma omp for schedule(static)
      for (int64_t s = 0; s < sequences_; ++s)
        if (size(s) > PIECE) results.get()[s] = result(join, joined(s, sums.get()));
#pragma omp for schedule(dynamic, 16)
      for (int64_t p = 0; p < pieces; ++p) {
        const int64_t s = sequence_of(p), from = begin(s) + (p - first_piece_.get()[s]) * PIECE;
        const F value = static_cast<F>(results.get()[s]);
        for (int64_t i = from; i < smaller(from + PIECE, begin(s) + size(s)); ++i) spread[i] = value;
      }
    }
  }

 private:
  int64_t begin(int64_t s) const { return larger(0, smaller(cu_[s], tokens_)); }
  int64_t size(int64_t s) const { return larger(0, smaller(cu_[s + 1], tokens_) - begin(s)); }
  static double result(Join join, WeightedSum s) {
    return join == Join::sum ? s.value : s.weight == 0 ? 0 : s.value / s.weight;
  }

  /// The sequence whose pieces include p: the last one that starts at or before it and has a piece.
  int64_t sequence_of(int64_t p) const {
    int64_t low = 0, high = sequences_;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (first_piece_.get()[middle] <= p ? low : high) = middle;
    }
    return low;
  }
  WeightedSum joined(int64_t s, const WeightedSum* sums) const {
    WeightedSum all{0, 0};
    for (int64_t p = first_piece_.get()[s]; p < first_piece_.get()[s + 1]; ++p) {
      all.value += sums[p].value;
      all.weight += sums[p].weight;
    }
    return all;
  }

  const int64_t* cu_;
  int64_t sequences_, tokens_;
  CallBuffer<int64_t> first_piece_;
};

}  // namespace fusedpg::FUSEDPG_ISA
