// Charts of CKY and Eisner in exp space: the weight of an item over i … j is exp θ · Σ_k left(i, k) right(k', j).
//
// Each lane of a vector holds another sentence. Rows of items are computed from the last to the first, in blocks of
// columns whose sums stay in registers. Derivatives are computed from the first row to the last: with
// f(i, j) = exp θ · ∂value/∂item(i, j), the derivative by an item is a sum over f in the row and the column of the
// item.
//
// The Hessian product is the derivative of the gradient along z. The same sums of dual numbers compute it.
#include "charts.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>

#include "../base/math.h"
#include "../base/memory.h"
#include "../base/threads.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;
constexpr double none = -std::numeric_limits<double>::infinity(), unit = 1.44269504088896340735992468;

enum class ArcFactor { one, forth, back };  // 1, or exp θ[i, j], or exp θ[j, i]

struct RuleTarget {
    int kind;
    ArcFactor weight;
};

// The sum over 0 ≤ t < j − i of left(i, i + left_shift + t) · right(i + right_shift + t, j), times a weight.
struct Rule {
    int left, left_shift, right, right_shift;
    int targets;
    RuleTarget target[2];
};

// A span is a word, or two spans.
struct Spans {
    static constexpr int kinds = 1, root = 0;
    static constexpr bool has_words = true;
    static constexpr int count = 1;
    static constexpr Rule rules[count] = {{0, 0, 0, 1, 1, {{0, ArcFactor::forth}}}};
};

// An incomplete item has an arc between its ends, forth or back; a complete one has all modifiers of its one end.
struct Arcs {
    enum { forth, back, right, left };
    static constexpr int kinds = 4, root = right;
    static constexpr bool has_words = false;
    static constexpr int count = 3;
    static constexpr Rule rules[count] = {{right, 0, left, 1, 2, {{forth, ArcFactor::forth}, {back, ArcFactor::back}}},
                                          {forth, 1, right, 1, 1, {{right, ArcFactor::one}}},
                                          {left, 0, back, 0, 1, {{left, ArcFactor::one}}}};
};

// One number for each lane. Vector is double for a single sentence.
template <class Vector>
struct Plain {
    using V = Vector;
    using Mask = decltype(V{} < V{});
    static constexpr int lanes = sizeof(V) / sizeof(double), parts = 1;
    V x{};

    static Plain at(const double* from, int64_t) { return {load_vector<V>(from)}; }
    void put(double* to, int64_t) const { std::memcpy(to, &x, sizeof x); }
    void add(Plain a) { x += a.x; }
    void add_product(Plain a, Plain b) { x += a.x * b.x; }
    Plain times(Plain b) const { return {x * b.x}; }
    Plain over(Plain b) const { return {x / b.x}; }
    Plain where(Mask mask) const { return {mask ? x : V{}}; }
    V result() const { return x; }
};

// Numbers and their derivatives along z.
template <class Vector>
struct Dual {
    using V = Vector;
    using Mask = decltype(V{} < V{});
    static constexpr int lanes = sizeof(V) / sizeof(double), parts = 2;
    V x{}, change{};

    static Dual at(const double* from, int64_t part) { return {load_vector<V>(from), load_vector<V>(from + part)}; }
    void put(double* to, int64_t part) const {
        std::memcpy(to, &x, sizeof x);
        std::memcpy(to + part, &change, sizeof change);
    }
    void add(Dual a) {
        x += a.x;
        change += a.change;
    }
    void add_product(Dual a, Dual b) {
        x += a.x * b.x;
        change += a.change * b.x;
        change += a.x * b.change;
    }
    Dual times(Dual b) const { return {x * b.x, change * b.x + x * b.change}; }
    Dual over(Dual b) const { return {x / b.x, (change - x / b.x * b.change) / b.x}; }
    Dual where(Mask mask) const { return {mask ? x : V{}, mask ? change : V{}}; }
    V result() const { return change; }
};

// The mean of the scores that are not −∞. Scores far below the others count as −50.
template <class V>
struct Mean {
    V sum{}, count{};

    void add(V scores) {
        const auto is_there = scores > V{} + none;
        sum += is_there ? greater_of(scores, V{} - 50) : V{};
        count += is_there ? V{} + 1 : V{};
    }
    V get() const { return sum / greater_of(count, V{} + 1); }
};

template <class V>
struct Extremes {
    V least = V{} - none, greatest = V{} + none;

    void add(V x) {
        least = lesser_of(x, least);
        greatest = greater_of(x, greatest);
    }
    bool is_within(double low, double high) const { return !any(least < V{} + low) && !any(greatest > V{} + high); }
};

// The sentences of the lanes. Lanes from `count` on repeat the first and have no result.
struct Sentences {
    int count;
    int64_t sentence[lanes_of<double>], length[lanes_of<double>];
};

// Tables of numbers N for the items of each kind. The two parts of a number are neighbors in memory, or in two halves
// of a row if there is one lane. A row has an odd number of blocks, so that a column is spread over all cache sets.
template <class N, int block>
class Tables {
    const int64_t places;

public:
    static constexpr int step = N::lanes > 1 ? N::lanes * N::parts : 1;  // from a column to the next
    const int64_t row = (((places + block - 1) / block) | 1) * block * N::lanes * N::parts;
    const int64_t part = N::lanes > 1 ? N::lanes : row / N::parts;

    Tables(int kinds, int64_t most) : places(most), numbers(scratch<double>(kinds * places * row)) {}

    double* at(int kind, int64_t i, int64_t j) const { return numbers.get() + (kind * places + i) * row + j * step; }
    N get(int kind, int64_t i, int64_t j) const { return N::at(at(kind, i, j), part); }
    void put(int kind, int64_t i, int64_t j, N number) const { number.put(at(kind, i, j), part); }

private:
    const Array<double> numbers;
};

struct Strides {
    int64_t a, b;    // from t to t + 1
    int64_t across;  // from b(t, m) to b(t, m + 1)
    int64_t part;    // from a number to its change
};

// sums[m] += Σ_t a(t) · b(t, m)
template <int block, class N>
__attribute__((always_inline)) inline void add_products(N* sums, const double* a, const double* b, Strides by,
                                                        int64_t count) {
    N own[block];
#pragma GCC unroll 8
    for (int m = 0; m < block; ++m) own[m] = sums[m];
    for (int64_t t = 0; t < count; ++t) {
        const N left = N::at(a + t * by.a, by.part);
#pragma GCC unroll 8
        for (int m = 0; m < block; ++m) own[m].add_product(left, N::at(b + t * by.b + m * by.across, by.part));
    }
#pragma GCC unroll 8
    for (int m = 0; m < block; ++m) sums[m] = own[m];
}

// For one sentence, a vector holds neighbors in m, or in t.
template <int block>
__attribute__((always_inline)) inline void add_products(Plain<double>* sums, const double* a, const double* b,
                                                        Strides by, int64_t count) {
    using V = Vec<double>;
    constexpr int W = lanes_of<double>, vectors = block / W;
    V own[block] = {};
    int64_t t = 0;
    if (by.across == 1) {
        for (; t + 1 < count; t += 2) {
#pragma GCC unroll 8
            for (int m = 0; m < vectors; ++m) {
                own[m] += a[t * by.a] * load(b + t * by.b + m * W);
                own[m + vectors] += a[(t + 1) * by.a] * load(b + (t + 1) * by.b + m * W);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < vectors; ++m) own[m] += own[m + vectors];
    } else {
        for (; t + W <= count; t += W) {
#pragma GCC unroll 8
            for (int m = 0; m < block; ++m) own[m] += load(a + t) * load(b + t + m * by.across);
        }
#pragma GCC unroll 8
        for (int m = 0; m < vectors; ++m) own[m] = sum_rows<double>(own + m * W);
    }
    double* const numbers = &sums->x;
#pragma GCC unroll 8
    for (int m = 0; m < vectors; ++m) store(numbers + m * W, load(numbers + m * W) + own[m]);
    for (; t < count; ++t) {
        for (int m = 0; m < block; ++m) numbers[m] += a[t * by.a] * b[t * by.b + m * by.across];
    }
}

template <int block>
__attribute__((always_inline)) inline void add_products(Dual<double>* sums, const double* a, const double* b,
                                                        Strides by, int64_t count) {
    Plain<double> own[block], change[block];
    add_products<block>(own, a, b, by, count);
    add_products<block>(change, a + by.part, b, by, count);
    add_products<block>(change, a, b + by.part, by, count);
    for (int m = 0; m < block; ++m) sums[m].add({own[m].x, change[m].x});
}

template <class Model, class N>
class Chart {
    using V = typename N::V;
    using Mask = typename N::Mask;
    using ScoreVector = Vec<double>;  // of all lanes, or of neighbors in a row if there is one lane
    static constexpr int W = N::lanes, all = lanes_of<double>, columns = all / W;
    static constexpr int block = W > 1 ? 8 / N::parts : 8;  // columns whose sums stay in registers
    static constexpr int64_t tile = 16;                     // rows that read the same columns one after another
    static constexpr int step = Tables<N, block>::step;

    const int64_t places;
    const bool single_root;
    Tables<N, block> weight{1, places};  // θ, then exp θ, then the result
    Tables<N, block> inside{Model::kinds, places}, factor{Model::count, places};
    int64_t size = 0;  // positions of the longest sentence
    V last{};
    double centre[W] = {};
    N share;  // the derivative of the value by the root
    Extremes<ScoreVector> exponents;
    Extremes<V> items;
    Mask is_bad{};
    Pace pace;

public:
    Chart(int64_t most, bool has_one_root) : places(most), single_root(has_one_root) {}

    // Solves all items. False if numbers leave the range in which their products are exact.
    template <class S>
    bool solve(const Sentences& group, const S* theta, const S* z) {
        size = *std::max_element(group.length, group.length + W);
        exponents = Extremes<ScoreVector>();
        items = Extremes<V>();
        is_bad = Mask{};
        double ends[W];
        for (int l = 0; l < W; ++l) ends[l] = double(group.length[l] - 1);
        last = load_vector<V>(ends);
        read(group, theta, z);
        exponentiate();
        if (any(is_bad) || !exponents.is_within(-480, 480)) return false;
        for (int64_t end = size; end > 0; end -= tile) {
            const int64_t begin = std::max<int64_t>(end - tile, 0);
            for (int64_t j = begin / block * block; j < size; j += block) {
                for (int64_t i = end - 1; i >= begin; --i) solve_block(i, j);
            }
        }
        return items.is_within(1e-145, 1e145);
    }

    double value(const Sentences& group, int l) const {
        const int64_t end = group.length[l] - 1;
        const double total = inside.at(Model::root, 0, end)[l];
        return total > 0 ? std::log(total) + centre[l] * double(end + Model::has_words) : none;
    }

    // Replaces the weights by the derivatives of the value by the scores, times a seed for each lane.
    void differentiate(const double* seed) {
        N total;
        for (int64_t j = 0; j < size; ++j) total.add(inside.get(Model::root, 0, j).where(last == V{} + double(j)));
        const Mask has_tree = total.x > V{};
        N numerator;
        numerator.x = load_vector<V>(seed);
        share = numerator.over(total).where(has_tree);
        for (int64_t begin = 0; begin < size; begin += tile) {
            const int64_t end = std::min(begin + tile, size);
            for (int64_t j = (size - 1) / block * block; j >= 0; j -= block) {
                for (int64_t i = begin; i < end; ++i) differentiate_block(i, j);
            }
        }
    }

    // Writes the derivatives by the scores, with a distance from one sentence to the next.
    template <class S>
    void write(const Sentences& group, S* to, int64_t stride) const {
        for (int64_t i = 0; i < places; ++i) {
            for (int64_t j = 0; j < places; j += W) {
                V v[W] = {};
                if (std::max(i, j) < size && j >= read_begin(i)) {
                    for (int k = 0; k < W; ++k) v[k] = load_vector<V>(weight.at(0, i, j + k));
                }
                if constexpr (W > 1) transpose(v);
                for (int l = 0; l < group.count; ++l) {
                    S* const row = to + group.sentence[l] * stride + i * places + j;
                    if constexpr (W > 1) store_some<S, double>(row, v[l], places - j);
                    else *row = S(v[l]);
                }
            }
        }
    }

private:
    // Whole vectors of scores have been read in row i: from this column on, and up to `read_end`.
    static int64_t read_begin(int64_t i) { return Model::has_words ? i / all * all : 0; }
    int64_t read_end() const { return (size + all - 1) / all * all; }

    // Scores of W columns, with a sentence in each lane.
    template <class S>
    __attribute__((always_inline)) void gather(const Sentences& group, const S* from, int64_t i, int64_t j,
                                               V* v) const {
        for (int l = 0; l < W; ++l) {
            const S* const row = from + (group.sentence[l] * places + i) * places + j;
            double some[W] = {};
            if constexpr (W > 1) {
                if (j + W <= places) store(some, load_as<double>(row));
                else std::copy(row, row + places - j, some);
            } else {
                some[0] = j < places ? double(*row) : 0;
            }
            v[l] = load_vector<V>(some);
        }
        if constexpr (W > 1) transpose(v);
    }

    template <class S>
    __attribute__((noinline)) void read(const Sentences& group, const S* theta, const S* z) {
        Mean<V> words, rest;
        for (int64_t i = 0; i < size; ++i) {
            for (int64_t j = read_begin(i); j < read_end(); j += W) {
                V score[W], along[W];
                gather(group, theta, i, j, score);
                if (N::parts > 1) gather(group, z, i, j, along);
                for (int k = 0; k < W; ++k) {
                    const int64_t column = j + k;
                    const bool is_used = Model::has_words ? i <= column : column > 0 && i != column;
                    const Mask is_inside = V{} + double(std::max(i, column)) <= last;
                    const V own = is_used ? (is_inside ? score[k] : V{} + none) : V{} + none;
                    (Model::has_words && i == column ? words : rest).add(own);
                    is_bad |= !(own < V{} - none);
                    N number;
                    number.x = own;
                    if constexpr (N::parts > 1) number.change = along[k];
                    weight.put(0, i, column, number);
                }
            }
        }
        // All trees have equally many words, or arcs. From the score of each we subtract a guess of how much a word
        // adds to the value: the mean score, and the growth of the number of trees.
        const V guess = Model::has_words ? words.get() + rest.get() + 1.4 : rest.get() + 1.9;
        std::memcpy(centre, &guess, sizeof centre);
    }

    __attribute__((noinline)) void exponentiate() {
        for (int64_t i = 0; i < size; ++i) {
            for (int64_t j = read_begin(i); j < read_end(); j += columns) {
                double* const own = weight.at(0, i, j);
                const ScoreVector score = load(own), x = (score - guesses(i, j)) * unit, result = exp2_of(x);
                const auto is_there = score > ScoreVector{} + none;
                exponents.add(is_there ? x : ScoreVector{});
                store(own, result);
                if constexpr (N::parts > 1) {
                    store(own + weight.part, is_there ? result * load(own + weight.part) : ScoreVector{});
                }
            }
        }
    }

    // The guesses in a vector of scores. Of spans only the words have one.
    ScoreVector guesses(int64_t i, int64_t j) const {
        if (Model::has_words && (i < j || i >= j + columns)) return ScoreVector{};
        double guess[all];
        for (int l = 0; l < all; ++l) guess[l] = Model::has_words && i != j + l / W ? 0 : centre[l % W];
        return load(guess);
    }

    // The weight of an item. If the root has one modifier, only its whole item has a weight.
    N weight_of(const RuleTarget& target, int64_t i, int64_t j) const {
        if (target.weight == ArcFactor::forth) return weight.get(0, i, j);
        if (target.weight == ArcFactor::back) return weight.get(0, j, i);
        N one;
        one.x += 1;
        return single_root && target.kind == Model::root && i == 0 ? one.where(last == V{} + double(j)) : one;
    }

    // The items of row i in the columns from j on.
    __attribute__((noinline)) void solve_block(int64_t i, int64_t j) {
        const int64_t end = std::min(j + block, size);
        if (end <= i) return;
        pace.spend(end - i);
        N sums[Model::count][block];
        int64_t begin[Model::count];
#pragma GCC unroll 3
        for (int r = 0; r < Model::count; ++r) {
            const Rule& rule = Model::rules[r];
            const int64_t first = 1 - rule.right_shift;  // row i itself is not known yet
            begin[r] = std::max(first, j - i - rule.left_shift);
            add_products<block>(sums[r], inside.at(rule.left, i, i + rule.left_shift + first),
                                inside.at(rule.right, i + 1, j), {step, inside.row, step, inside.part},
                                begin[r] - first);
        }
        if (j <= i) start(i);
        for (int64_t column = std::max(j, i + 1); column < end; ++column) {
#pragma GCC unroll 3
            for (int r = 0; r < Model::count; ++r) {
                const Rule& rule = Model::rules[r];
                N sum = sums[r][column - j];
                for (int64_t t = begin[r]; t < column - i; ++t) {
                    sum.add_product(inside.get(rule.left, i, i + rule.left_shift + t),
                                    inside.get(rule.right, i + rule.right_shift + t, column));
                }
                if (rule.right_shift == 0) {
                    sum.add_product(inside.get(rule.left, i, i + rule.left_shift), inside.get(rule.right, i, column));
                }
                finish(rule, i, column, sum);
            }
        }
    }

    // The item of one word, or of one position.
    void start(int64_t i) {
        if constexpr (Model::has_words) {
            inside.put(0, i, i, weight.get(0, i, i));
        } else {
            N one;
            one.x += 1;
            inside.put(Model::right, i, i, one);
            inside.put(Model::left, i, i, one);
        }
    }

    __attribute__((always_inline)) void finish(const Rule& rule, int64_t i, int64_t j, N sum) {
        for (int t = 0; t < rule.targets; ++t) {
            const N own = weight_of(rule.target[t], i, j), item = own.times(sum);
            inside.put(rule.target[t].kind, i, j, item);
            items.add(((own.x > V{}) & (sum.x > V{})) ? item.x : V{} + 1);
        }
    }

    // f of row i in the columns from j on, and the results of their scores.
    __attribute__((noinline)) void differentiate_block(int64_t i, int64_t j) {
        const int64_t end = std::min(j + block, size);
        if (end <= i) return;
        pace.spend(size);
        N sums[Model::kinds][block];
#pragma GCC unroll 3
        for (int r = 0; r < Model::count; ++r) {
            const Rule& rule = Model::rules[r];
            const int64_t shift = rule.right_shift - rule.left_shift;
            add_products<block>(sums[rule.left], factor.at(r, i, j + block),
                                inside.at(rule.right, j + shift, j + block), {step, step, inside.row, inside.part},
                                size - j - block);
            add_products<block>(sums[rule.right], inside.at(rule.left, 0, i - shift), factor.at(r, 0, j),
                                {inside.row, factor.row, step, inside.part}, i);
        }
        for (int64_t column = end - 1; column >= std::max(i + !Model::has_words, j); --column) {
#pragma GCC unroll 3
            for (int r = Model::count - 1; r >= 0; --r) {
                N sum;
                for (int t = 0; t < Model::rules[r].targets; ++t) {
                    const RuleTarget target = Model::rules[r].target[t];
                    const N own = sums[target.kind][column - j];
                    sum.add(give(target, i, column, complete(target.kind, i, column, end, own)));
                }
                factor.put(r, i, column, sum);
            }
        }
    }

    // Adds the terms of f in the item's own block to the derivative by an item.
    __attribute__((always_inline)) N complete(int kind, int64_t i, int64_t j, int64_t end, N sum) const {
#pragma GCC unroll 3
        for (int r = 0; r < Model::count; ++r) {
            const Rule& rule = Model::rules[r];
            if (rule.left == kind) {
                const int64_t other = j + rule.right_shift - rule.left_shift;
                for (int64_t k = end - 1; k >= j + 1 - rule.left_shift; --k) {  // f(i, j + 1) was computed last
                    sum.add_product(factor.get(r, i, k), inside.get(rule.right, other, k));
                }
            }
            if (rule.right == kind && rule.right_shift == 0) {
                sum.add_product(factor.get(r, i, j), inside.get(rule.left, i, i + rule.left_shift));
            }
        }
        if (kind == Model::root && i == 0) sum.add(share.where(last == V{} + double(j)));
        return sum;
    }

    // Replaces the weight of an item by the derivative by its score, and returns the item's term of f.
    __attribute__((always_inline)) N give(const RuleTarget& target, int64_t i, int64_t j, N derivative) const {
        const N own = weight_of(target, i, j);
        const V result = derivative.times(inside.get(target.kind, i, j)).result();
        if (target.weight == ArcFactor::forth) std::memcpy(weight.at(0, i, j), &result, sizeof result);
        if (target.weight == ArcFactor::back) std::memcpy(weight.at(0, j, i), &result, sizeof result);
        return own.times(derivative);
    }
};

// Calls body(chart, group) for all sentences, on several threads. Sentences of similar length share a group.
template <class Model, class N, class S, class Body>
bool for_groups(const ChartProblem<S>& problem, const S* z, Body body) {
    constexpr int lanes = N::lanes;
    std::atomic<bool> all_good{true};
    const Array<int64_t> order = scratch<int64_t>(problem.batch);
    std::iota(order.get(), order.get() + problem.batch, 0);
    std::stable_sort(order.get(), order.get() + problem.batch,
                     [&](int64_t a, int64_t b) { return problem.lengths[a] > problem.lengths[b]; });
    const auto make = [&] { return Chart<Model, N>(problem.places, problem.single_root); };
    take_turns((problem.batch + lanes - 1) / lanes, problem.threads, make, [&](int64_t n, Chart<Model, N>& chart) {
        Sentences group{};
        group.count = int(std::min<int64_t>(lanes, problem.batch - n * lanes));
        for (int l = 0; l < lanes; ++l) {
            group.sentence[l] = order[n * lanes + (l < group.count ? l : 0)];
            group.length[l] = problem.lengths[group.sentence[l]];
        }
        if (chart.solve(group, problem.theta, z)) body(chart, group);
        else all_good = false;
    });
    return all_good;
}

template <class Model, template <class> class Number, class S, class Body>
bool for_sentences(const ChartProblem<S>& problem, const S* z, Body body) {
    // Two sentences take as long one by one as in a group, and can have a thread each.
    if (problem.batch > 2) return for_groups<Model, Number<Vec<double>>>(problem, z, body);
    return for_groups<Model, Number<double>>(problem, z, body);
}

template <class Model, class S>
bool forward(const ChartProblem<S>& problem, S* value, S* expected, int64_t stride) {
    return for_sentences<Model, Plain>(problem, problem.theta, [&](auto& chart, const Sentences& group) {
        for (int l = 0; l < group.count; ++l) value[group.sentence[l]] = S(chart.value(group, l));
        if (!expected) return;
        const double seed[] = {1, 1, 1, 1};
        chart.differentiate(seed);
        chart.write(group, expected, stride);
    });
}

template <class Model, class S>
bool hessian(const ChartProblem<S>& problem, const S* seed, const S* z, S* product) {
    return for_sentences<Model, Dual>(problem, z, [&](auto& chart, const Sentences& group) {
        double seeds[lanes_of<double>] = {};
        for (int l = 0; l < group.count; ++l) seeds[l] = double(seed[group.sentence[l]]);
        chart.differentiate(seeds);
        chart.write(group, product, problem.places * problem.places);
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
