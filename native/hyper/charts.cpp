// Charts of CKY and Eisner: an item over the places i … j has the weight of a score times Σ_k left(i, k) right(k', j).
//
// Tables are stored by first place and by last, so that both factors of a sum are runs in k. Items of one width do not
// depend on each other, and what is not yet known is 0: a vector may read past the end of a run, and what it adds past
// the end is never read.
#include "charts.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../base/math.h"
#include "../base/memory.h"
#include "../base/threads.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;
using V = Vec<double>;
constexpr int64_t W = lanes_of<double>;

enum class Weight { one, forth, back };  // 1, or exp θ[i, j], or exp θ[j, i]

struct Target {
    int kind;
    Weight weight;
};

// k runs over as many places as the item is wide: left from (i, i + left_shift), right from (i + right_shift, j).
struct Rule {
    int left, left_shift, right, right_shift;
    int targets;
    Target target[2];
};

// A span is a word, or two spans.
struct Spans {
    static constexpr int kinds = 1, root = 0;
    static constexpr bool has_words = true;
    static constexpr int count = 1;
    static constexpr Rule rules[count] = {{0, 0, 0, 1, 1, {{0, Weight::forth}}}};
};

// An incomplete item has an arc between its ends, forth or back; a complete one has all modifiers of its one end.
struct Arcs {
    enum { forth, back, right, left };
    static constexpr int kinds = 4, root = right;
    static constexpr bool has_words = false;
    static constexpr int count = 3;
    static constexpr Rule rules[count] = {{right, 0, left, 1, 2, {{forth, Weight::forth}, {back, Weight::back}}},
                                     {forth, 1, right, 1, 1, {{right, Weight::one}}},
                                     {left, 0, back, 0, 1, {{left, Weight::one}}}};
};

// Runs of items: those to the left of a place k, and those to the right of it.
struct Runs {
    double *left, *right;
};
struct Sums {
    double value, change;
};

// Σ left · right and, if `tangent`, its change.
template <bool tangent>
__attribute__((always_inline)) inline Sums dots(Runs of, Runs change, int64_t count) {
    V sum[2] = {}, of_left[2] = {}, of_right[2] = {};
    const auto take = [&](int64_t k, int n) {
        const V left = load(of.left + k), right = load(of.right + k);
        sum[n] += left * right;
        if constexpr (tangent) {
            of_left[n] += load(change.left + k) * right;
            of_right[n] += left * load(change.right + k);
        }
    };
    int64_t k = 0;
    for (; k + W < count; k += 2 * W) {
        take(k, 0);
        take(k + W, 1);
    }
    if (k < count) take(k, 0);
    const double value = sum_lanes<double>(sum[0] + sum[1])[0];
    if constexpr (!tangent) return {value, 0};
    return {value, sum_lanes<double>(of_left[0] + of_left[1] + of_right[0] + of_right[1])[0]};
}

// The transpose: what a factor, with its change, gives to the mass of both sides, and to its drift.
template <bool tangent>
__attribute__((always_inline)) inline void give_back(Sums factor, Runs of, Runs change, Runs mass, Runs drift,
                                                     int64_t count) {
    const double *const left = of.left, *const right = of.right;
    double *__restrict const left_mass = mass.left, *__restrict const right_mass = mass.right;
    for (int64_t k = 0; k < count; k += W) {
        const V a = load(left + k), b = load(right + k);
        store(left_mass + k, load(left_mass + k) + factor.value * b);
        store(right_mass + k, load(right_mass + k) + factor.value * a);
        if constexpr (tangent) {
            const V a_change = load(change.left + k), b_change = load(change.right + k);
            store(drift.left + k, load(drift.left + k) + factor.change * b + factor.value * b_change);
            store(drift.right + k, load(drift.right + k) + factor.change * a + factor.value * a_change);
        }
    }
}

constexpr double none = -std::numeric_limits<double>::infinity(), unit = 1.44269504088896340735992468;

// Of the scores that are not −∞; what is far below the others takes no part in a guess.
struct Mean {
    V sum{}, count{};
    bool is_good = true;  // none is NaN or +∞

    void add(V scores) {
        const auto is_there = scores > V{} + none;
        sum += is_there ? greater<double>(scores, V{} - 50) : V{};
        count += is_there ? V{} + 1 : V{};
        is_good &= !any(!(scores < V{} - none));
    }
    double of() const {
        const double entries = sum_lanes<double>(count)[0];
        return entries > 0 ? sum_lanes<double>(sum)[0] / entries : 0;
    }
};

// Numbers of all items, stored twice.
class Tables {
    int64_t places = 0, stride = 0;
    Array<double> numbers;

    double* table(int which) const { return numbers.get() + which * places * stride; }

public:
    Tables() = default;
    Tables(int kinds, int64_t most)
        : places(most), stride(most + 2 * W), numbers(scratch<double>(2 * kinds * most * stride)) {}

    void clear(int kinds) { std::fill_n(numbers.get(), 2 * kinds * places * stride, 0.0); }
    double* by_first(int kind, int64_t i) const { return table(2 * kind) + i * stride; }
    double* by_last(int kind, int64_t j) const { return table(2 * kind + 1) + j * stride; }
    void set(int kind, int64_t i, int64_t j, double x) const { by_first(kind, i)[j] = by_last(kind, j)[i] = x; }
    double sum(int kind, int64_t i, int64_t j) const { return by_first(kind, i)[j] + by_last(kind, j)[i]; }
};

// One sentence after the other, and along a direction if `tangent`: `change` is of what is inside, `drift` of the mass.
// Scores and results are doubles here: they are few beside the items.
template <class Model, bool tangent>
class Chart {
    const int64_t places;
    const bool single_root;
    Tables inside{Model::kinds, places}, mass{Model::kinds, places}, change, drift;
    const int64_t stride = (places + W - 1) / W * W;
    Array<double> weight = scratch<double>(places * stride);
    int64_t last = 0;
    double centre = 0;

public:
    Array<double> z, out;

    Chart(int64_t most, bool has_one_root) : places(most), single_root(has_one_root), out(scratch<double>(most * most)) {
        if (!tangent) return;
        change = Tables(Model::kinds, most);
        drift = Tables(Model::kinds, most);
        z = scratch<double>(most * most);
    }

    double total() const { return inside.by_first(Model::root, 0)[last]; }
    double value() const {
        const int64_t weights = last + Model::has_words;
        return total() > 0 ? std::log(total()) + centre * double(weights) : none;
    }

    template <class S>
    void read(const S* theta, int64_t length) {
        last = length - 1;
        for (int64_t i = 0; i <= last; ++i) {
            double* const row = &weight[i * stride];
            for (int64_t j = 0; j <= last; ++j) row[j] = double(theta[i * places + j]);
            std::fill(row + length, row + stride, none);
        }
    }

    // From what was read, and z if `tangent`. False if numbers leave the range in which their products are exact.
    __attribute__((noinline)) bool solve() {
        inside.clear(Model::kinds);
        if (tangent) change.clear(Model::kinds);
        bool good = exponentiate();
        for (int64_t i = 0; i <= last; ++i) good &= start(i);
        Pace pace;
        for (int64_t width = 1; width <= last; ++width) {
            for (int64_t i = 0; i + width <= last; ++i) {
                pace.spend(width);
#pragma GCC unroll 3
                for (int r = 0; r < Model::count; ++r) good &= apply(Model::rules[r], i, i + width);
            }
        }
        return good;
    }

    // What the scores get from a seed, to `out`.
    __attribute__((noinline)) void spread(double seed) {
        mass.clear(Model::kinds);
        if (tangent) drift.clear(Model::kinds);
        std::fill_n(out.get(), places * places, 0.0);
        if (!(total() > 0)) return;
        const double share = seed / total();
        mass.by_first(Model::root, 0)[last] = share;
        if (tangent) drift.by_first(Model::root, 0)[last] = -share * change.by_first(Model::root, 0)[last] / total();
        Pace pace;
        for (int64_t width = last; width > 0; --width) {
            for (int64_t i = 0; i + width <= last; ++i) {
                pace.spend(width);
#pragma GCC unroll 3
                for (int r = Model::count - 1; r >= 0; --r) undo(Model::rules[r], i, i + width);
            }
        }
        for (int64_t i = 0; Model::has_words && i <= last; ++i) give(0, i, i, place(Weight::forth, i, i));
    }

private:
    static bool is_exact(double x) { return x == 0 || (x > 1e-145 && x < 1e145); }

    // Where the score of an item is in θ, and its weight.
    int64_t place(Weight way, int64_t i, int64_t j) const {
        return way == Weight::back ? j * places + i : i * places + j;
    }
    double weight_of(Weight way, int64_t i, int64_t j) const {
        return way == Weight::one ? 1 : way == Weight::back ? weight[j * stride + i] : weight[i * stride + j];
    }

    bool is_dropped(const Rule& rule, int64_t i, int64_t j) const {
        return single_root && !Model::has_words && rule.target[0].kind == Model::root && i == 0 && j < last;
    }

    // Every tree has as many words, or arcs: a guess of what each of them multiplies is taken off its score.
    bool exponentiate() {
        Mean words, rest;
        for (int64_t i = 0; i <= last; ++i) {
            double* const row = &weight[i * stride];
            const double word = row[i];
            if constexpr (Model::has_words) {
                words.add(V{word, none, none, none});
                std::fill_n(row, i + 1, none);
            } else {
                row[0] = row[i] = none;
            }
            for (int64_t j = 0; j <= last; j += W) rest.add(load(row + j));
            if (Model::has_words) row[i] = word;
        }
        centre = Model::has_words ? words.of() + rest.of() + 1.4 : rest.of() + 1.9;  // and the number of trees grows
        V least = V{} + 1, most = V{} + 1;
        for (int64_t i = 0; i <= last; ++i) {
            double* const row = &weight[i * stride];
            if constexpr (Model::has_words) row[i] -= centre;
            const V less = V{} + (Model::has_words ? 0 : centre);
            for (int64_t j = Model::has_words ? i / W * W : 0; j <= last; j += W) {
                const V score = load(row + j), own = exp2_of((score - less) * unit);
                store(row + j, own);
                least = lesser<double>(score > V{} + none ? own : V{} + 1, least);
                most = greater<double>(own, most);
            }
        }
        const double lowest = least_lane<double>(least)[0];  // a score that is there must leave a trace
        return rest.is_good && words.is_good && lowest > 0 && is_exact(lowest) &&
               is_exact(greatest_lane<double>(most)[0]);
    }

    bool start(int64_t i) {
        if constexpr (Model::has_words) {
            const double own = weight_of(Weight::forth, i, i);
            inside.set(0, i, i, own);
            if (tangent && own > 0) change.set(0, i, i, own * z[place(Weight::forth, i, i)]);
            return is_exact(own);
        } else {
            inside.set(Model::right, i, i, 1);
            inside.set(Model::left, i, i, 1);
            return true;
        }
    }

    static Runs runs(const Tables& of, const Rule& rule, int64_t i, int64_t j) {
        return {of.by_first(rule.left, i) + i + rule.left_shift, of.by_last(rule.right, j) + i + rule.right_shift};
    }
    // Of a table that is there along a direction only.
    static Runs along(const Tables& of, const Rule& rule, int64_t i, int64_t j) {
        return tangent ? runs(of, rule, i, j) : Runs{};
    }

    __attribute__((always_inline)) bool apply(const Rule& rule, int64_t i, int64_t j) {
        if (is_dropped(rule, i, j)) return true;
        const auto [sum, change_of_sum] = dots<tangent>(runs(inside, rule, i, j), along(change, rule, i, j), j - i);
        bool good = true;
        for (int t = 0; t < rule.targets; ++t) {
            const Target target = rule.target[t];
            const int64_t score = place(target.weight, i, j);
            const double own = weight_of(target.weight, i, j), x = own * sum;
            inside.set(target.kind, i, j, x);
            good &= is_exact(x) && (x > 0 || own == 0 || sum == 0);
            if constexpr (tangent) {
                const double own_change = target.weight == Weight::one || own == 0 ? 0 : z[score];
                change.set(target.kind, i, j, own * (change_of_sum + own_change * sum));
            }
        }
        return good;
    }

    // The share of an item goes to its score.
    void give(int kind, int64_t i, int64_t j, int64_t score) const {
        const double x = inside.by_first(kind, i)[j], own = mass.sum(kind, i, j);
        if constexpr (tangent) out[score] = own * change.by_first(kind, i)[j] + drift.sum(kind, i, j) * x;
        else out[score] = own * x;
    }

    __attribute__((always_inline)) void undo(const Rule& rule, int64_t i, int64_t j) {
        if (is_dropped(rule, i, j)) return;
        Sums factor{};
        for (int t = 0; t < rule.targets; ++t) {
            const Target target = rule.target[t];
            const int64_t score = place(target.weight, i, j);
            const bool is_scored = target.weight != Weight::one;
            const double own = weight_of(target.weight, i, j), share = mass.sum(target.kind, i, j);
            if (own == 0) continue;
            if (is_scored) give(target.kind, i, j, score);
            factor.value += own * share;
            if constexpr (tangent) {
                factor.change += own * (drift.sum(target.kind, i, j) + (is_scored ? z[score] * share : 0));
            }
        }
        give_back<tangent>(factor, runs(inside, rule, i, j), along(change, rule, i, j), runs(mass, rule, i, j),
                           along(drift, rule, i, j), j - i);
    }
};

// body(chart, sentence) for all, over the threads, where a sentence could be solved; whether all could.
template <class Model, bool tangent, class S, class Body>
bool for_sentences(const ChartProblem<S>& problem, const S* z, Body body) {
    std::atomic<bool> all_good{true};
    const int64_t size = problem.places * problem.places;
    const auto make = [&] { return Chart<Model, tangent>(problem.places, problem.single_root); };
    take_turns(problem.batch, problem.threads, make, [&](int64_t n, Chart<Model, tangent>& chart) {
        chart.read(problem.theta + n * size, problem.lengths[n]);
        if (tangent) std::copy_n(z + n * size, size, chart.z.get());
        if (chart.solve()) body(chart, n);
        else all_good = false;
    });
    return all_good;
}

template <class Model, class S>
bool forward(const ChartProblem<S>& problem, S* value, S* expected) {
    const int64_t size = problem.places * problem.places;
    return for_sentences<Model, false>(problem, problem.theta, [&](auto& chart, int64_t n) {
        value[n] = S(chart.value());
        if (!expected) return;
        chart.spread(1);
        std::copy_n(chart.out.get(), size, expected + n * size);
    });
}

template <class Model, class S>
bool hessian(const ChartProblem<S>& problem, const S* seed, const S* z, S* product) {
    const int64_t size = problem.places * problem.places;
    return for_sentences<Model, true>(problem, z, [&](auto& chart, int64_t n) {
        chart.spread(double(seed[n]));
        std::copy_n(chart.out.get(), size, product + n * size);
    });
}

}  // namespace

template <class S>
ChartKernels<S> span_kernels() {
    return {forward<Spans, S>, hessian<Spans, S>};
}
template <class S>
ChartKernels<S> arc_kernels() {
    return {forward<Arcs, S>, hessian<Arcs, S>};
}

template ChartKernels<float> span_kernels<float>();
template ChartKernels<double> span_kernels<double>();
template ChartKernels<float> arc_kernels<float>();
template ChartKernels<double> arc_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
